// The operator of SwiGLU on the CPU beside its formula, alone and on meshes.
#include "tests/support/core_support.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/swiglu.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace dtensor::test::swiglu {

namespace {

at::Tensor by_formula(const at::Tensor& gate, const at::Tensor& up) { return gate / ((-gate).exp() + 1) * up; }
at::Tensor by_operator(const at::Tensor& gate, const at::Tensor& up) { return nn::detail::gated(gate, up); }

struct Results {
  at::Tensor y, gate, up;
};

template <class F>
Results results_of(const F& f, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& factors) {
  const auto own_gate = gate.detach().clone().requires_grad_(), own_up = up.detach().clone().requires_grad_();
  const auto y = f(own_gate, own_up);
  (y * factors).sum().backward();
  return {y.detach(), own_gate.grad(), own_up.grad()};
}

double error(const at::Tensor& got, const at::Tensor& expected) {
  if (expected.numel() == 0) return 0;
  return ((got.to(at::kDouble) - expected).abs() / (expected.abs() + 1)).max().item<double>();
}

}  // namespace

TEST_CASE("nn: the swiglu operator equals its formula", "[nn]") {
  torch::manual_seed(6);
  for (const auto& [dtype, bound] : std::vector<std::pair<at::ScalarType, double>>{{at::kDouble, 1e-14}, {at::kFloat, 1e-6}}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{1}, {15}, {16}, {7, 33}, {2, 5, 16}, {700, 170}, {0, 4}}) {
      CAPTURE(c10::toString(dtype), sizes);
      const auto some = [&, type = dtype](double scale) { return (at::randn(sizes, at::kDouble) * scale).to(type); };
      const auto gate = some(5), up = some(1), factors = some(1);
      const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
      const auto got = results_of(by_operator, gate, up, factors);
      const auto expected = results_of(by_formula, wide(gate), wide(up), wide(factors));
      CHECK(got.y.scalar_type() == dtype);
      CHECK(error(got.y, expected.y) <= bound);
      CHECK(error(got.gate, expected.gate) <= bound);
      CHECK(error(got.up, expected.up) <= bound);
      if (gate.dim() > 1 && gate.size(0) > 1)  // an element's bits are its own
        CHECK(by_operator(gate.narrow(0, 1, 1), up.narrow(0, 1, 1)).equal(by_operator(gate, up).narrow(0, 1, 1)));
      const auto turned = [](const at::Tensor& t) { return t.dim() > 1 ? t.transpose(0, 1) : t; };
      CHECK(by_operator(turned(gate), turned(up)).equal(turned(by_operator(gate, up))));
    }
  }
}

TEST_CASE("nn: the swiglu operator of large and infinite gates", "[nn]") {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    const auto gate = at::tensor({-kInfinity, -1000.0, -80.0, -0.0, 0.0, 80.0, 1000.0, kInfinity, std::nan("")}, at::kDouble).to(dtype);
    const auto y = by_operator(gate, at::ones_like(gate)), expected = at::silu(gate);
    CHECK(y.isnan().equal(expected.isnan()));
    CHECK(y.nan_to_num().allclose(expected.nan_to_num(), 1e-6, 1e-30));
  }
}

TEST_CASE("nn: the swiglu operator has second gradients", "[nn]") {
  const auto second = [](const auto& f) {
    torch::manual_seed(8);
    const auto gate = at::randn({3, 5}, at::kDouble).requires_grad_(), up = at::randn({3, 5}, at::kDouble).requires_grad_();
    const auto first = torch::autograd::grad({f(gate, up).pow(3).sum()}, {gate, up}, {}, true, true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {gate, up});
  };
  const auto got = second(by_operator), expected = second(by_formula);
  for (size_t i = 0; i < 2; ++i) CHECK(got[i].allclose(expected[i], 1e-10, 1e-10));
}

TEST_CASE("nn: SwiGLU of other dtypes is libtorch's", "[nn]") {
  torch::manual_seed(9);
  const auto gate = at::randn({4, 8}).to(at::kBFloat16), up = at::randn({4, 8}).to(at::kBFloat16);
  CHECK(by_operator(gate, up).equal(at::silu(gate) * up));
}

TEST_CASE("nn: the swiglu operator on meshes", "[nn]") {
  for (const std::string transport : {"threads", "shm"}) {
    for (const int ranks : {1, 2, 3, 4}) {
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"tp"});
            torch::manual_seed(10);
            const auto gate = at::randn({4, 6, 9}), up = at::randn({4, 6, 9}), factors = at::randn({4, 6, 9});
            const auto plain = results_of(by_operator, gate, up, factors);
            const Spmd spmd(mesh);
            for (const auto& placement : {shard(0), shard(1), shard(2), replicate()}) {
              for (const auto& of_up : {placement, replicate()}) {
                const auto laid = [&](const at::Tensor& t, const Placement& p) { return distribute_tensor(t, mesh, {p}); };
                const auto got = results_of(by_operator, laid(gate, placement), laid(up, of_up), laid(factors, placement));
                require(full_tensor(got.y).equal(plain.y), "test", "other bits under {}", placement.str());
                require(full_tensor(got.gate).equal(plain.gate), "test", "another gradient of the gate under {}", placement.str());
                require(full_tensor(got.up).equal(plain.up), "test", "another gradient of up under {}", placement.str());
              }
            }
            const auto parts = from_local(gate, mesh, {partial()}, gate.sizes()).tensor();  // a sum over ranks
            const auto of_sum = by_operator(parts, distribute_tensor(up, mesh, {replicate()}));
            require(full_tensor(of_sum).allclose(by_operator(gate * ranks, up), 1e-5, 1e-6), "test", "a gate in parts was not added up");
          },
          transport));
    }
  }
}

}  // namespace dtensor::test::swiglu
