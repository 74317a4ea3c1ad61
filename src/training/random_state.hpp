// Saves and restores the random state of the calling rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace dtensor::detail {

class RandomState {
 public:
  // The present state of the streams for the CPU and `devices`, and of the stream of rank_local_random().
  static RandomState now(const std::vector<c10::Device>& devices);
  // Makes each stream go on from this state.
  void apply() const;

 private:
  struct Stream {
    c10::Device device;
    bool own;
    at::Tensor state;
  };
  std::vector<Stream> streams_;
};

}  // namespace dtensor::detail
