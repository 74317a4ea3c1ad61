// Activation checkpointing refuses what it could not do again.
#include "tests/support/core_support.hpp"
#include "tests/support/dispatch_support.hpp"

#include <dtensor/training/checkpoint.hpp>

namespace dt = dtensor;
using namespace dt::test;

TEST_CASE("checkpoint: what cannot work says so", "[checkpoint]") {
  const auto x = counting({3}).requires_grad_();
  const auto exp = [](const at::Tensor& t) { return t.exp(); };
  REQUIRE_THROWS_WITH(dt::checkpoint(dt::CheckpointOptions{{"aten::nothing"}}, exp, x), says("there is no operator 'aten::nothing'"));
  REQUIRE_THROWS_WITH(dt::checkpoint(dt::CheckpointOptions{{"aten::add_"}}, exp, x), says("'aten::add_' writes to its operands"));
  for (const auto* name : {"aten::mm", "aten::addmm.out"}) {
    const bool writes = std::string(name) == "aten::addmm.out";
    if (writes) REQUIRE_THROWS_WITH(dt::checkpoint(dt::CheckpointOptions{{name}}, exp, x), says("writes to its operands"));
    else REQUIRE_NOTHROW(dt::checkpoint(dt::CheckpointOptions{{name}}, exp, x));
  }
  {
    at::NoGradGuard no_grad;
    REQUIRE_FALSE(dt::checkpoint(exp, x).requires_grad());
  }
  int turn = 0;
  const auto fickle = [&](const at::Tensor& t) { return turn++ == 0 ? t.exp().exp() : t.repeat({2}).exp(); };
  REQUIRE_THROWS_WITH(dt::checkpoint(fickle, x).sum().backward(), says("did not do the same again: tensor 0"));
  turn = 0;
  const auto shorter = [&](const at::Tensor& t) { return turn++ == 0 ? t.exp().exp() : t.exp(); };
  REQUIRE_THROWS_WITH(dt::checkpoint(shorter, x).sum().backward(), says("saved 1 of 2 tensors"));
  turn = 0;
  const auto other = [&](const at::Tensor& t) { return turn++ == 0 ? t.exp().sin() : t.sin().sin(); };
  REQUIRE_THROWS_WITH(dt::checkpoint(dt::CheckpointOptions{{"aten::exp", "aten::sin"}}, other, x).sum().backward(),
                      says("called aten::sin where it had called aten::exp"));
  const auto overwrites = [](const at::Tensor& t) { return t.sin().add_(1).exp(); };
  REQUIRE_THROWS_WITH(dt::checkpoint(dt::CheckpointOptions{{"aten::sin"}}, overwrites, x).sum().backward(),
                      says("was written to in place"));
  REQUIRE_NOTHROW(dt::checkpoint(overwrites, x).sum().backward());
  const auto overwrites_saved = [](const at::Tensor& t) {
    auto y = t.exp();
    y.add_(1);
    return y.exp();
  };
  REQUIRE_THROWS_WITH(overwrites_saved(x).sum().backward(), says("modified by an inplace operation"));
  REQUIRE_THROWS_WITH(dt::checkpoint(overwrites_saved, x).sum().backward(), says("modified by an in-place operation"));
  const auto input = x * 2;
  const auto y = dt::checkpoint([](const at::Tensor& t) { return t.exp().exp(); }, input);
  input.mul_(3);
  REQUIRE_THROWS_WITH(y.sum().backward(), says("modified by an inplace operation"));
}
