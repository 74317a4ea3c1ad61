// CUDA devices of host memory, for running the nccl transport where there is no GPU: streams are threads that do one thing after the other,
// tensors on a device are plain memory, and libtorch's kernels for them are the few that make and copy tensors.
#pragma once

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

FakeStream& fake_stream(int device, int64_t id);
FakeStream& current_fake_stream();

}  // namespace dtensor_tests
