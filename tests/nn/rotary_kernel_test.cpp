// The rotary operator on the CPU beside the formula that other devices compute, alone and on meshes.
#include "tests/support/core_support.hpp"

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/rotary_embedding.hpp>

#include <torch/torch.h>

namespace dtensor::test::rotary {

namespace {

at::Tensor by_formula(const at::Tensor& x, const nn::RotaryTable& table) {
  const auto cos = table.cos.unsqueeze(1), sin = table.sin.unsqueeze(1);
  const auto pairs = x.unflatten(-1, {-1, 2}).unbind(-1);
  const auto turned = at::stack({pairs[0] * cos - pairs[1] * sin, pairs[0] * sin + pairs[1] * cos}, -1);
  return turned.flatten(-2).to(x.scalar_type());
}

template <class F>
at::Tensor gradient_of(const F& f, const at::Tensor& x, const at::Tensor& weights) {
  const auto leaf = x.detach().clone().requires_grad_();
  (f(leaf) * weights).sum().backward();
  return leaf.grad();
}

}  // namespace

TEST_CASE("nn: the rotary operator has the bits of its formula", "[nn]") {
  torch::manual_seed(3);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const auto& [batch, length, heads, dim] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{1, 1, 1, 2},
                                                    {2, 7, 3, 40}, {1, 37, 1, 64}, {3, 0, 2, 8}, {2, 5, 4, 6}}) {
      CAPTURE(c10::toString(dtype), batch, length, heads, dim);
      const auto wide = at::randn({batch, length, heads, dim + 3}).to(dtype);
      const auto table = nn::rotary_table(length, dim, {}, wide);
      const auto turned = [&](const at::Tensor& y) { return nn::apply_rotary(y, table); };
      const auto expected = [&](const at::Tensor& y) { return by_formula(y, table); };
      for (const auto& x : {wide.narrow(-1, 3, dim), wide.narrow(-1, 1, dim).transpose(1, 2).contiguous().transpose(1, 2)}) {
        CHECK(turned(x).equal(expected(x)));
        const auto weights = at::randn_like(x);
        const auto got = gradient_of(turned, x, weights), wanted = gradient_of(expected, x, weights);
        if (dtype == at::kBFloat16) CHECK(got.allclose(wanted, 1.0 / 64, 1e-2));  // the formula's sum is of rounded terms
        else CHECK(got.equal(wanted));
      }
    }
  }
}

TEST_CASE("nn: rotary tables are what their positions say whatever was made before", "[nn]") {
  const auto expected = [](int64_t length, const nn::RotaryOptions& options, c10::ScalarType dtype) {
    const auto angles = at::arange(length, at::kDouble).unsqueeze(1) * nn::rotary_frequencies(8, options);
    return std::pair(angles.cos().to(dtype), angles.sin().to(dtype));
  };
  {
    const c10::InferenceMode inference;
    nn::rotary_table(3, 8, {}, at::ones(1));
  }
  const nn::RotaryOptions other{.theta = 100}, scaled{.scaling = nn::RotaryScaling{}}, yarn{.yarn = nn::YarnScaling{}};
  for (const auto& options : {nn::RotaryOptions{}, other, scaled, yarn}) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      for (const int64_t length : {3, 1, 9, 0, 33, 5}) {
        CAPTURE(length, options.theta, c10::toString(dtype));
        const auto table = nn::rotary_table(length, 8, options, at::ones(1, dtype));
        const auto [cos, sin] = expected(length, options, dtype);
        CHECK(table.cos.equal(cos));
        CHECK(table.sin.equal(sin));
        table.cos.zero_();  // the caller's own
        table.sin.zero_();
      }
    }
  }
  const auto x = at::ones({1, 3, 1, 8}).requires_grad_();
  CHECK_NOTHROW(nn::apply_rotary(x, nn::rotary_table(3, 8, {}, x)).sum().backward());
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
    const Spmd spmd(mesh);
    const auto table = nn::rotary_table(7, 8, {}, torch::ones({1}));
    require(is_dtensor(table.cos) && is_dtensor(table.sin), "test", "plain tables");
    const auto cos = full_tensor(table.cos), sin = full_tensor(table.sin);
    const NoSpmd plain;
    const auto [all_cos, all_sin] = expected(7, {}, at::kFloat);
    require(cos.equal(all_cos) && sin.equal(all_sin), "test", "other tables");
  }));
}

TEST_CASE("nn: the rotary operator has second gradients and tables that learn", "[nn]") {
  torch::manual_seed(4);
  const auto x = at::randn({1, 3, 2, 4}, at::kDouble).requires_grad_(), weights = at::randn({1, 3, 2, 4}, at::kDouble).requires_grad_();
  auto table = nn::rotary_table(3, 4, {}, x);
  const auto first = torch::autograd::grad({(nn::apply_rotary(x, table) * weights).sum()}, {x}, {}, true, true)[0];
  const auto second = torch::autograd::grad({first.square().sum()}, {weights})[0];
  CHECK(second.allclose(2 * weights, 1e-12, 1e-12));  // a turn keeps lengths
  table.cos.requires_grad_();
  nn::apply_rotary(x, table).sum().backward();
  CHECK(table.cos.grad().abs().sum().item<double>() > 0);
}

TEST_CASE("nn: the rotary operator refuses a table whose sines do not fit", "[nn]") {
  const auto x = at::randn({2, 3, 1, 4}), cos = at::ones({3, 2});
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{1, 2}, {0, 2}, {3, 1}, {2}}) {
    CHECK_THROWS_WITH(nn::apply_rotary(x, {cos, at::ones(sizes)}), says("twice [length, dim / 2]"));
  }
}

TEST_CASE("nn: rotary positions refuse what are no heads of numbers", "[nn]") {
  const nn::RotaryTable table{at::ones({3, 2}), at::ones({3, 2})};
  CHECK_THROWS_WITH(nn::apply_rotary(at::randn({2, 3, 4}), table), says("expected floating [batch, length, heads, dim]"));
  CHECK_THROWS_WITH(nn::apply_rotary(at::ones({2, 3, 1, 4}, at::kLong), table), says("expected floating [batch, length, heads, dim]"));
}

TEST_CASE("nn: the rotary operator on meshes", "[nn]") {
  for (const std::string transport : {"threads", "shm"}) {
    for (const int ranks : {1, 2, 3, 4}) {
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"tp"});
            torch::manual_seed(5);
            const auto x = at::randn({4, 6, 4, 8}), weights = at::randn({4, 6, 4, 8});
            const auto table = nn::rotary_table(6, 8, {}, x);
            const auto plain = [&](const at::Tensor& y) { return by_formula(y, table); };
            const Spmd spmd(mesh);
            for (const auto& placement : {shard(0), shard(1), shard(2), shard(3), replicate()}) {
              const auto whole = nn::rotary_table(6, 8, {}, x);
              const auto turned = [&](const at::Tensor& y) { return nn::apply_rotary(y, whole); };
              const auto local = distribute_tensor(x, mesh, {placement}), w = distribute_tensor(weights, mesh, {placement});
              require(full_tensor(turned(local)).equal(plain(x)), "test", "other bits under {}", placement.str());
              require(full_tensor(gradient_of(turned, local, w)).equal(gradient_of(plain, x, weights)), "test", "gradient under {}",
                      placement.str());
            }
          },
          transport));
    }
  }
}

}  // namespace dtensor::test::rotary
