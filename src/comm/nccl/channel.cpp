// Non-blocking communicators of NCCL: every call may return before it is done, and is asked for until it is.
#include "src/comm/nccl/channel.hpp"

#include "src/comm/nccl/native_stream.hpp"

#include <dtensor/error.hpp>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace dtensor::comm::nccl {

namespace {

// How long the end of a communicator without trouble may take before it is aborted.
constexpr std::chrono::seconds kFarewell{10};

ncclConfig_t make_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

c10::Device cuda_device(int device) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)}; }

// From short to longer sleeps: most calls are done at once, the first ones connect to peers.
class Patience {
 public:
  void sleep() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(next_ * 2, std::chrono::microseconds(2000));
  }

 private:
  std::chrono::microseconds next_{5};
};

}  // namespace

std::string describe(ncclResult_t result, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  return fmt::format("NCCL failed: {}{}{}; hint: NCCL_DEBUG=WARN says more", ncclGetErrorString(result), last && *last ? ": " : "",
                     last ? last : "");
}

ncclUniqueId make_unique_id() {
  ncclUniqueId id;
  const auto result = ncclGetUniqueId(&id);
  if (result != ncclSuccess) fail("nccl", "cannot make an id for a communicator: {}", describe(result, nullptr));
  return id;
}

std::shared_ptr<Channel> Channel::make(const ncclUniqueId& id, int size, int rank, int device, const Check& check) {
  const c10::DeviceGuard on(cuda_device(device));
  auto config = make_config();
  ncclComm_t comm = nullptr;
  const auto result = ncclCommInitRankConfig(&comm, size, id, rank, &config);
  if (!comm) fail("nccl", "cannot set up a communicator of {} ranks: {}", size, describe(result, nullptr));
  auto channel = std::make_shared<Channel>(comm, rank, device);
  try {
    const auto settled = channel->settle(result, check);
    if (settled != ncclSuccess) fail("nccl", "cannot set up a communicator of {} ranks: {}", size, describe(settled, comm));
  } catch (...) {
    channel->abort();
    throw;
  }
  return channel;
}

std::shared_ptr<Channel> Channel::split(const Check& check) {
  const c10::DeviceGuard on(cuda_device(device_));
  auto config = make_config();
  ncclComm_t comm = nullptr;
  ncclResult_t result = ncclInternalError;
  {
    std::lock_guard lock(mutex_);
    if (comm_) result = ncclCommSplit(comm_, 0, rank_, &comm, &config);
  }
  result = settle(result, check);  // until then there may be no child
  if (result != ncclSuccess || !comm) fail("nccl", "cannot split a communicator: {}", describe(result, nullptr));
  auto child = std::make_shared<Channel>(comm, rank_, device_);
  try {
    result = child->settle(ncclInProgress, check);
    if (result != ncclSuccess) fail("nccl", "cannot split a communicator: {}", describe(result, comm));
  } catch (...) {
    child->abort();
    throw;
  }
  return child;
}

Channel::Channel(ncclComm_t comm, int rank, int device)
    : comm_(comm), rank_(rank), device_(device),
      stream_(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(cuda_device(device), true)) {}

Channel::~Channel() {
  try {
    const c10::DeviceGuard on(cuda_device(device_));
    if (comm_) {
      const auto end = std::chrono::steady_clock::now() + kFarewell;
      struct TooLate {};
      const auto result = settle(ncclCommFinalize(comm_), [&] {
        if (std::chrono::steady_clock::now() > end) throw TooLate{};
      });
      if (result == ncclSuccess) {
        ncclCommDestroy(comm_);
        comm_ = nullptr;
      }
    }
  } catch (...) {  // a device that failed, or peers that do not come: there is nobody to tell
  }
  abort();
}

// The state of a communicator is that of its last call.
ncclResult_t Channel::settle(ncclResult_t result, const Check& check) {
  for (Patience patience; result == ncclInProgress; patience.sleep()) {
    {
      std::lock_guard lock(mutex_);
      if (!comm_) return ncclInternalError;
      const auto asked = ncclCommGetAsyncError(comm_, &result);
      if (asked != ncclSuccess) return asked;
    }
    if (result != ncclInProgress) break;
    check();
  }
  return result;
}

void Channel::run(const Enqueue& enqueue, const Check& check) {
  const c10::DeviceGuard on(cuda_device(device_));
  ncclResult_t result = ncclSuccess;
  {
    std::lock_guard lock(mutex_);
    if (!comm_) throw Broken{"the communicator was aborted"};
    result = ncclGroupStart();
    if (!has_failed(result)) {
      const auto enqueued = enqueue(comm_, native_stream(stream_));
      result = ncclGroupEnd();
      if (has_failed(enqueued)) result = enqueued;
    }
    if (has_failed(result)) throw Broken{describe(result, comm_)};
  }
  result = settle(ncclInProgress, check);
  if (result == ncclSuccess) return;
  std::lock_guard lock(mutex_);
  throw Broken{comm_ ? describe(result, comm_) : "the communicator was aborted"};
}

std::optional<std::string> Channel::error() {
  std::lock_guard lock(mutex_);
  ncclResult_t state = ncclSuccess;
  if (!comm_) return std::nullopt;
  const auto asked = ncclCommGetAsyncError(comm_, &state);
  const auto result = asked != ncclSuccess ? asked : state;
  if (!has_failed(result)) return std::nullopt;
  return describe(result, comm_);
}

void Channel::abort() {
  std::lock_guard lock(mutex_);
  if (comm_) ncclCommAbort(comm_);
  comm_ = nullptr;
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
void* Channel::add_memory(void* memory, size_t bytes, const Check& check) {
  const c10::DeviceGuard on(cuda_device(device_));
  void* handle = nullptr;
  ncclResult_t result = ncclInternalError;
  {
    std::lock_guard lock(mutex_);
    if (comm_) result = ncclCommRegister(comm_, memory, bytes, &handle);
  }
  return settle(result, check) == ncclSuccess ? handle : nullptr;
}

void Channel::remove_memory(void* handle) {
  std::lock_guard lock(mutex_);
  if (comm_) ncclCommDeregister(comm_, handle);
}
#else
void* Channel::add_memory(void*, size_t, const Check&) { return nullptr; }
void Channel::remove_memory(void*) {}
#endif

}  // namespace dtensor::comm::nccl
