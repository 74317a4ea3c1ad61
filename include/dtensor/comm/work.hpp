// The handle of a collective that may still be under way.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>

namespace dtensor::comm {

class Work : public c10::intrusive_ptr_target {
 public:
  // Blocks until the result may be read and the input may be written again. Throws dtensor::Error naming rank,
  // operation and sequence number when a peer failed, diverged, or the deadline passed. May be called repeatedly.
  virtual void wait() = 0;

  // Whether wait() would return (or throw) at once.
  virtual bool done() = 0;
};
using WorkPtr = c10::intrusive_ptr<Work>;

// A result and the work that fills it. `work` is null when it is already complete.
struct Async {
  at::Tensor tensor;
  WorkPtr work;

  // The finished result.
  at::Tensor get() && {
    if (work) work->wait();
    return std::move(tensor);
  }
};

}  // namespace dtensor::comm
