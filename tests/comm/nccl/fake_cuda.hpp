// CUDA devices of host memory, for running the nccl transport where there is no GPU: streams are threads that do one thing after the other,
// tensors on a device are plain memory, and operators run on the host (fake_kernels.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace dtensor_tests {

constexpr int kFakeDevices = 8;

// What runs on a stream, in order. Never destroyed.
class FakeStream {
 public:
  void add(std::function<void()> task);
  // Blocks until everything so far has run.
  void synchronize();

 private:
  struct State;
  State* state_ = make();
  static State* make();
};

// The same memory as a tensor of the host; a tensor of the host as it is.
at::Tensor host_view(const at::Tensor& tensor);

// Whether the calling thread's stream is said to be captured for a CUDA graph.
inline thread_local bool is_capturing = false;

FakeStream& fake_stream(int device, int64_t id);
FakeStream& current_fake_stream();
int current_fake_device();
// Blocks until all streams of the device have run everything so far.
void synchronize_fake_device(int device);

}  // namespace dtensor_tests
