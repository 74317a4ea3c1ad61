// What the calling rank draws next.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace dtensor::detail {

class RandomState {
 public:
  // Of the streams for the CPU and `devices`, and the rank's own.
  static RandomState now(const std::vector<c10::Device>& devices);
  // Each stream goes on from here.
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
