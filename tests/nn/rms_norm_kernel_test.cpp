// The operator of RMSNorm on the CPU beside its formula, alone and on meshes.
#include "tests/support/core_support.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/rms_norm.hpp>

#include <torch/torch.h>

#include <algorithm>

namespace dtensor::test::rms_norm {

namespace {

constexpr double kEps = 1e-3;

at::Tensor by_formula(const at::Tensor& x, const at::Tensor& weight) {
  return x / (x.square().mean(-1, true) + kEps).sqrt() * weight;
}

struct Gradients {
  at::Tensor y, x, weight;
};

template <class F>
Gradients gradients_of(const F& f, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& factors) {
  const auto own_x = x.detach().clone().requires_grad_(), own_weight = weight.detach().clone().requires_grad_();
  const auto y = f(own_x, own_weight);
  (y * factors).sum().backward();
  return {y.detach(), own_x.grad(), own_weight.grad()};
}

at::Tensor by_operator(const at::Tensor& x, const at::Tensor& weight) { return nn::detail::normalized(x, weight, kEps); }

double error(const at::Tensor& got, const at::Tensor& expected) {
  if (expected.numel() == 0) return 0;
  return (got.to(at::kDouble) - expected).abs().max().item<double>() / std::max(1.0, expected.abs().max().item<double>());
}

}  // namespace

TEST_CASE("nn: the rms_norm operator equals its formula", "[nn]") {
  torch::manual_seed(6);
  const std::vector<std::pair<at::ScalarType, double>> bounds{{at::kDouble, 1e-13}, {at::kFloat, 3e-6}, {at::kBFloat16, 2e-2}};
  for (const auto& [dtype, bound] : bounds) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{1}, {7, 1}, {2, 5, 16}, {3, 37}, {700, 50}, {0, 4}, {4, 3, 2, 129}}) {
      CAPTURE(c10::toString(dtype), sizes);
      const auto x = at::randn(sizes, at::kDouble).to(dtype), factors = at::randn(sizes, at::kDouble).to(dtype);
      const auto weight = at::randn({sizes.back()}, at::kDouble).to(dtype);
      REQUIRE(nn::detail::has_kernel(x, weight));
      const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
      const auto got = gradients_of(by_operator, x, weight, factors);
      const auto expected = gradients_of(by_formula, wide(x), wide(weight), wide(factors));
      CHECK(got.y.scalar_type() == dtype);
      CHECK(error(got.y, expected.y) <= bound);
      CHECK(error(got.x, expected.x) <= bound);
      CHECK(error(got.weight, expected.weight) <= bound);
      if (x.dim() > 1 && x.size(0) > 1)  // a row's bits are its own
        CHECK(by_operator(x.narrow(0, 1, 1), weight).equal(by_operator(x, weight).narrow(0, 1, 1)));
    }
  }
}

TEST_CASE("nn: the rms_norm operator has second gradients", "[nn]") {
  torch::manual_seed(7);
  const auto second = [](const auto& f) {
    torch::manual_seed(8);
    const auto x = at::randn({3, 5}, at::kDouble).requires_grad_(), weight = at::randn({5}, at::kDouble).requires_grad_();
    const auto first = torch::autograd::grad({f(x, weight).pow(3).sum()}, {x, weight}, {}, true, true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {x, weight});
  };
  const auto got = second(by_operator), expected = second(by_formula);
  for (size_t i = 0; i < 2; ++i) CHECK(got[i].allclose(expected[i], 1e-10, 1e-10));
}

TEST_CASE("nn: layers of other dtypes or with features that are cut use the formula", "[nn]") {
  torch::manual_seed(9);
  const auto x = at::randn({4, 8});
  CHECK_FALSE(nn::detail::has_kernel(x, at::ones({8}, at::kDouble)));
  CHECK_FALSE(nn::detail::has_kernel(x.to(at::kHalf), at::ones({8}, at::kHalf)));
  CHECK_FALSE(nn::detail::has_kernel(x, at::ones({4})));
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"tp"});
    const Spmd spmd(mesh);
    nn::RMSNorm norm(8, kEps);
    const auto cut = distribute_tensor(x, mesh, {shard(1)});
    require(!nn::detail::has_kernel(cut, norm->weight), "test", "the operator would gather x");
    require(full_tensor(norm(cut)).allclose(by_formula(x, at::ones({8})), 1e-5, 1e-6), "test", "other values");
  }));
}

TEST_CASE("nn: RMSNorm refuses integers and rows of another size", "[nn]") {
  nn::RMSNorm norm(8, kEps);
  CHECK_THROWS_WITH(norm(at::ones({4, 8}, at::kLong)), says("expected floating [..., 8]"));
  CHECK_THROWS_WITH(norm(at::ones({4, 1})), says("got x [4, 1]"));
  CHECK_THROWS_WITH(norm(at::ones({})), says("got x []"));
}

TEST_CASE("nn: the rms_norm operator on meshes", "[nn]") {
  for (const std::string transport : {"threads", "shm"}) {
    for (const int ranks : {1, 2, 3, 4}) {
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"tp"});
            torch::manual_seed(10);
            const auto x = at::randn({4, 6, 9}, at::kDouble), factors = at::randn({4, 6, 9}, at::kDouble);
            const auto weight = at::randn({9}, at::kDouble);
            const auto plain = gradients_of(by_operator, x, weight, factors);
            const Spmd spmd(mesh);
            for (const auto& placement : {shard(0), shard(1), replicate()}) {
              for (const auto& of_weight : {replicate(), shard(0)}) {
                const auto laid = [&](const at::Tensor& t) { return distribute_tensor(t, mesh, {placement}); };
                const auto got = gradients_of(by_operator, laid(x), distribute_tensor(weight, mesh, {of_weight}), laid(factors));
                require(full_tensor(got.y).equal(plain.y), "test", "other bits under {}", placement.str());
                require(full_tensor(got.x).equal(plain.x), "test", "another gradient under {}", placement.str());
                require(full_tensor(got.weight).allclose(plain.weight, 1e-12, 1e-12), "test", "gradient of the weight under {}",
                        placement.str());
              }
            }
          },
          transport));
    }
  }
}

}  // namespace dtensor::test::rms_norm
