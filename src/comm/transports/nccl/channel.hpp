// A communicator of NCCL, with the stream that its calls run on.
#pragma once

#include <dtensor/comm/transport.hpp>

#include <c10/core/Stream.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace dtensor::comm::nccl {

// Called again and again while NCCL is at work on the host; throws to give up.
using Check = std::function<void()>;

// "unhandled cuda error: ..." with what NCCL noted last.
std::string describe(ncclResult_t result, ncclComm_t comm);

// Throws Error.
ncclUniqueId make_unique_id();

class Channel {
 public:
  // All `size` ranks call it with one id. Blocks until they have; when `check` throws, what there is so far is aborted.
  static std::shared_ptr<Channel> make(const ncclUniqueId& id, int size, int rank, int device, const Check& check);

  // Another one among the same ranks, which all call it, in one order.
  std::shared_ptr<Channel> split(const Check& check);

  Channel(int rank, int device);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const c10::Stream& stream() const { return stream_; }

  // The calls that `enqueue` makes (which returns the first result that is neither success nor in progress) as one group, on stream().
  // When it returns they are enqueued there. Throws Broken, or what `check` throws.
  struct Broken {
    std::string why;
  };
  using Enqueue = std::function<ncclResult_t(ncclComm_t, cudaStream_t)>;
  void run(const Enqueue& enqueue, const Check& check);

  // What NCCL has noticed by itself since, e.g. that a connection is gone.
  std::optional<std::string> error();

  // Ends all calls, also those that are under way on the device; what they would have given is undefined. No call is made any more.
  void abort();

  // See Communicator::register_memory; null when NCCL cannot.
  void* add_memory(void* memory, size_t bytes, const Check& check);
  void remove_memory(void* handle) noexcept;

 private:
  using Call = std::function<ncclResult_t(ncclComm_t)>;
  ncclResult_t make_call(const Call& call, const Check& check);
  ncclResult_t finish(ncclResult_t result, const Check& check);
  void finish_setup(ncclResult_t result, const Check& check, const char* what);

  std::mutex calling_;  // held until a call has ended: NCCL refuses another one before
  std::mutex mutex_;    // for each function of NCCL, as communicators are for one thread at a time
  ncclComm_t comm_ = nullptr;  // also once aborted
  const int rank_, device_;
  const c10::Stream stream_;  // one of the 32 that libtorch hands out in turn
};

// Whether a call was refused.
inline bool has_failed(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

}  // namespace dtensor::comm::nccl
