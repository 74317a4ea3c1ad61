// What tests of views share.
#pragma once

#include <dtensor/dtensor.hpp>

#include <torch/torch.h>

#include <fmt/ranges.h>

#include <functional>
#include <string>
#include <vector>

namespace dtensor::test::views {

namespace dt = dtensor;

using Shape = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

inline void on_each_rank(int ranks, const std::function<void()>& body, std::string transport = "threads") {
  dt::launch(dt::LaunchOptions{.ranks = ranks, .transport = std::move(transport), .deadline = std::chrono::seconds(60)},
             [&](dt::World&) { body(); });
}

inline dt::DeviceMesh mesh_of(const Shape& sizes) { return dt::init_device_mesh(at::kCPU, sizes); }

inline at::Tensor numbers(const Shape& sizes, int64_t first = 1) {
  int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(first, first + count, at::kFloat).view(sizes);
}

inline void check_equal(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  const auto full = dt::full_tensor(got);
  dt::require(got.sizes() == expected.sizes() && got.strides() == expected.strides(), "test",
              "{}: got sizes [{}] strides [{}]; expected [{}] strides [{}]", what, fmt::join(got.sizes(), ", "),
              fmt::join(got.strides(), ", "), fmt::join(expected.sizes(), ", "), fmt::join(expected.strides(), ", "));
  dt::require(at::equal(full, expected), "test", "{}: values differ", what);
}

}  // namespace dtensor::test::views
