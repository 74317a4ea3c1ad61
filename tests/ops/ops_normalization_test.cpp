// Layer, RMS and group normalization, under every placement.
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

TEST_CASE("ops: layer norm", "[ops][normalization]") {
  const auto x = fractions({5, 3, 4}), weight = fractions({4}, 1), bias = fractions({4}, 2);
  check({"layer_norm",
         {x, weight, bias},
         [](const Tensors& in) { return Tensors{torch::layer_norm(in[0], {4}, in[1], in[2])}; },
         1e-5});
  check({"layer_norm without affine",
         {x},
         [](const Tensors& in) {
           return Tensors{torch::layer_norm(in[0], {3, 4})};
         },
         1e-5});
  check({"native_layer_norm",
         {x, weight},
         [](const Tensors& in) {
           auto [out, mean, rstd] = torch::native_layer_norm(in[0], {4}, in[1], {}, 1e-5);
           return Tensors{out};
         },
         1e-5});
  check_free({"layer norm over batch and sequence",
              {x, weight, bias},
              [](const Tensors& in) { return Tensors{torch::layer_norm(in[0], {4}, in[1], in[2])}; },
              1e-5},
             {2, 2}, {{shard(0), shard(1)}, {replicate(), replicate()}, {replicate(), replicate()}}, {"(S(0), S(1))"});
}

TEST_CASE("ops: RMS norm", "[ops][normalization]") {
  const auto x = fractions({5, 3, 4}), weight = fractions({4}, 1);
  check({"rms norm by hand",
         {x, weight},
         [](const Tensors& in) { return Tensors{in[0] * torch::rsqrt(in[0].pow(2).mean(-1, true) + 1e-5) * in[1]}; },
         1e-5});
  check({"rms norm by hand with a sum in place",
         {x, weight},
         [](const Tensors& in) {
           return Tensors{in[0] * torch::rsqrt(in[0].pow(2).mean(-1, true).add_(1.5).sub_(0.5)) * in[1]};
         },
         1e-5});
#if __has_include(<ATen/ops/rms_norm.h>)
  check({"rms_norm",
         {x, weight},
         [](const Tensors& in) { return Tensors{at::rms_norm(in[0], {4}, in[1], 1e-5)}; },
         1e-5});
#endif
}

TEST_CASE("ops: group norm", "[ops][normalization]") {
  const auto x = fractions({5, 4, 3}), weight = fractions({4}, 1), bias = fractions({4}, 2);
  check({"group_norm",
         {x, weight, bias},
         [](const Tensors& in) { return Tensors{torch::group_norm(in[0], 2, in[1], in[2])}; },
         1e-5});
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {  // row-major, but its part is a view that is not
    const auto spread = distribute_tensor(fractions({3, 4, 1}).permute({2, 1, 0}), mesh, {shard(1)}).redistribute({replicate()});
    const auto got = torch::group_norm(spread->transpose(0, 2).transpose(0, 2).contiguous(), 2);
    require(full_tensor(got).allclose(torch::group_norm(fractions({3, 4, 1}).permute({2, 1, 0}).contiguous(), 2)), "test", "of a view");
    const auto turned = distribute_tensor(fractions({4, 2, 1}), mesh, {shard(1)}).redistribute({replicate()});
    require(full_tensor(torch::group_norm(turned->transpose(2, 0).transpose(1, 2), 1)).allclose(
                torch::group_norm(fractions({4, 2, 1}).transpose(2, 0).transpose(1, 2), 1)), "test", "of a transposed view");
  }));
}
