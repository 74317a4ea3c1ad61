// What the tests of dispatch and of gradients share: a mesh of all ranks, numbers, comparisons that throw.
#pragma once

#include "tests/support/core_support.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

namespace dtensor::test {

inline DeviceMesh line(World& world) { return init_device_mesh(torch::kCPU, {world.size()}, {"tp"}); }

inline at::Tensor counting(std::vector<int64_t> sizes) {
  int64_t n = 1;
  for (const auto size : sizes) n *= size;
  return (torch::arange(n, torch::kDouble) / 7 - 1).reshape(sizes);
}

inline void same(const at::Tensor& got, const at::Tensor& expected, const char* what) {
  const auto full = full_tensor(got);
  require(full.sizes() == expected.sizes() && full.equal(expected), "test", "{} differs", what);
}

inline void expect(const CommDebugMode& comm, int64_t count, const char* what) {
  require(comm.count() == count, "test", "{}: expected {} collectives; got\n{}", what, count, comm.str());
}

}  // namespace dtensor::test
