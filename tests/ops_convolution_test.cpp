// Convolutions and their gradients, under every placement.
#include "op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr double kTolerance = 1e-4;

Function conv2d(std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation = {1, 1}, int64_t groups = 1) {
  return [=](const Tensors& in) {
    return Tensors{torch::conv2d(in[0], in[1], in.size() > 2 ? in[2] : at::Tensor(), stride, padding, dilation, groups)};
  };
}

}  // namespace

TEST_CASE("ops: convolution", "[ops][convolution]") {
  const auto x = fractions({3, 4, 7, 6}), weight = fractions({5, 4, 3, 3}, 1), bias = fractions({5}, 2);
  check({"conv2d", {x, weight, bias}, conv2d({1, 1}, {1, 1}), kTolerance});
  check({"conv2d without bias or padding", {x, weight}, conv2d({1, 1}, {0, 0}), kTolerance});
  check({"conv2d with strides", {x, weight, bias}, conv2d({2, 3}, {1, 2}), kTolerance});
  check({"conv2d with dilation", {x, weight, bias}, conv2d({1, 2}, {2, 1}, {2, 2}), kTolerance});
}
