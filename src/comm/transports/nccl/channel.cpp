// Non-blocking communicators of NCCL: a call may return before it is done, and its state is then polled.
#include "src/comm/transports/nccl/channel.hpp"

#include "src/comm/transports/nccl/native_stream.hpp"

#include <dtensor/base/error.hpp>

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <exception>
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

// NCCL may write to where it was told to put the communicator until that has ended, so it is the channel's from the beginning.
std::shared_ptr<Channel> Channel::make(const ncclUniqueId& id, int size, int rank, int device, const Check& check) {
  auto channel = std::make_shared<Channel>(rank, device);
  const c10::DeviceGuard on(cuda_device(device));
  auto config = make_config();
  channel->finish_setup(ncclCommInitRankConfig(&channel->comm_, size, id, rank, &config), check, "set up");
  return channel;
}

std::shared_ptr<Channel> Channel::split(const Check& check) {
  auto child = std::make_shared<Channel>(rank_, device_);
  const c10::DeviceGuard on(cuda_device(device_));
  auto config = make_config();
  try {
    const auto result = make_call([&](ncclComm_t comm) { return ncclCommSplit(comm, 0, rank_, &child->comm_, &config); }, check);
    if (result != ncclSuccess) fail("nccl", "cannot split a communicator: {}", describe(result, nullptr));
  } catch (...) {
    abort();  // ends the split
    throw;
  }
  child->finish_setup(ncclInProgress, check, "split");
  return child;
}

void Channel::finish_setup(ncclResult_t result, const Check& check, const char* what) {
  try {
    if (!comm_) fail("nccl", "cannot {} a communicator: {}", what, describe(result, nullptr));
    result = finish(result, check);
    if (result != ncclSuccess) fail("nccl", "cannot {} a communicator: {}", what, describe(result, comm_));
  } catch (...) {
    abort();
    throw;
  }
}

Channel::Channel(int rank, int device)
    : rank_(rank), device_(device),
      stream_(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(cuda_device(device), true)) {}

Channel::~Channel() {
  try {
    const c10::DeviceGuard on(cuda_device(device_));
    if (comm_) {
      const auto end = std::chrono::steady_clock::now() + kFarewell;
      struct TooLate {};
      const auto result = make_call(ncclCommFinalize, [&] {
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
ncclResult_t Channel::finish(ncclResult_t result, const Check& check) {
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

ncclResult_t Channel::make_call(const Call& call, const Check& check) {
  std::lock_guard calling(calling_);
  {
    std::lock_guard lock(mutex_);
    const auto result = comm_ ? call(comm_) : ncclInternalError;
    if (has_failed(result)) return result;
  }
  return finish(ncclInProgress, check);
}

void Channel::run(const Enqueue& enqueue, const Check& check) {
  const c10::DeviceGuard on(cuda_device(device_));
  const auto result = make_call([&](ncclComm_t comm) {
    const auto started = ncclGroupStart();
    if (has_failed(started)) return started;
    const auto enqueued = enqueue(comm, native_stream(stream_));
    const auto ended = ncclGroupEnd();
    return has_failed(enqueued) ? enqueued : ended;
  }, check);
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
  const auto result = make_call([&](ncclComm_t comm) { return ncclCommRegister(comm, memory, bytes, &handle); }, check);
  return result == ncclSuccess ? handle : nullptr;
}

// Not under a call that is still under way.
void Channel::remove_memory(void* handle) noexcept {
  try {
    const c10::DeviceGuard on(cuda_device(device_));
    c10::Event end(c10::DeviceType::CUDA);
    end.record(stream_);
    for (Patience patience; !end.query(); patience.sleep()) {}
    std::lock_guard lock(mutex_);
    if (comm_) ncclCommDeregister(comm_, handle);
  } catch (const std::exception&) {  // of a device that failed
  }
}
#else
void* Channel::add_memory(void*, size_t, const Check&) { return nullptr; }
void Channel::remove_memory(void*) noexcept {}
#endif

}  // namespace dtensor::comm::nccl
