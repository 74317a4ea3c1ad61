// Batch and instance normalization, under every placement: statistics are those of one device.
#include "op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

// What training leaves in the running statistics is a result too.
Function batch_norm(bool training) {
  return [=](const Tensors& in) {
    const auto weight = in.size() > 1 ? in[1] : at::Tensor(), bias = in.size() > 2 ? in[2] : at::Tensor();
    const auto mean = torch::full({in[0].size(1)}, 0.25), variance = torch::full({in[0].size(1)}, 1.5);
    const auto y = torch::batch_norm(in[0], weight, bias, mean, variance, training, 0.3, 1e-5, false);
    return training ? Tensors{y, mean, variance} : Tensors{y};
  };
}

}  // namespace

TEST_CASE("ops: batch norm", "[ops][normalization]") {
  const auto x = fractions({5, 4, 3}), weight = fractions({4}, 1), bias = fractions({4}, 2);
  check({"batch_norm in training", {x, weight, bias}, batch_norm(true), 1e-4});
  check({"batch_norm in evaluation", {x, weight, bias}, batch_norm(false), 1e-4});
  check({"batch_norm of planes", {fractions({3, 2, 3, 5})}, batch_norm(true), 1e-4});
  check({"batch_norm of rows", {fractions({6, 3}), fractions({3}, 1)}, batch_norm(true), 1e-4});
  check({"batch_norm without running statistics",
         {x, weight, bias},
         [](const Tensors& in) {
           return Tensors{torch::batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false)};
         },
         1e-4});
  check({"instance_norm",
         {x, weight, bias},
         [](const Tensors& in) { return Tensors{torch::instance_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false)}; },
         1e-4});
  check_over("gloo", {"batch_norm in training", {x, weight, bias}, batch_norm(true), 1e-4});
}
