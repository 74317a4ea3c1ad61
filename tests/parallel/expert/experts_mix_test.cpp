// A mixture of experts on one device, against each token by itself, and on meshes against one device.
#include "tests/support/experts_support.hpp"

namespace dtensor::test::experts {

TEST_CASE("experts: a mixture is what each token computes by itself", "[experts]") {
  for (const bool gated : {true, false}) {
    for (const int64_t k : {1, 2, 6}) {
      CAPTURE(gated, k);
      auto c = mix_case({.k = k}, gated);
      c.chosen[0][0][0] = -1;  // a row that was dropped
      const auto got = one_device(c);
      const auto expected = result_of(mix_by_token(c), c.leaves());
      REQUIRE_NOTHROW(check_same(got, expected, 1e-13, "a mixture"));
    }
  }
}

TEST_CASE("experts: without rows an expert has a gradient of zeros", "[experts]") {
  auto c = mix_case();
  c.chosen.fill_(3);
  c.chosen.select(-1, 1).fill_(-1);
  const auto got = one_device(c);
  REQUIRE(got.gradients[2][0].abs().max().item<double>() == 0);
  REQUIRE(got.gradients[2][3].abs().max().item<double>() > 0);
  c.chosen.fill_(-1);
  const auto none = one_device(c);
  REQUIRE(none.y.abs().max().item<double>() == 0);
  for (const auto& gradient : none.gradients) REQUIRE(gradient.abs().max().item<double>() == 0);
}

TEST_CASE("experts: a gradient of a gradient is refused", "[experts]") {
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    const auto c = mix_case({}, true, dtype);
    const auto x = c.x.detach().requires_grad_();
    const auto y = mix_experts(x, c.chosen, c.weights, c.experts());
    CHECK_THROWS_WITH(torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true), says("create_graph"));
    CHECK_NOTHROW(torch::autograd::grad({y.sum()}, {x}));
  }
}

TEST_CASE("experts: one expert has the bits of the dense layer", "[experts]") {
  auto c = mix_case({.experts = 1, .k = 1}, true, at::kFloat);
  c.weights = torch::ones_like(c.weights);
  const auto x = c.x.reshape({-1, c.x.size(-1)});
  const auto dense = torch::mm(torch::silu(torch::mm(x, c.w1[0].t())) * torch::mm(x, c.w3[0].t()), c.w2[0].t()).view(c.x.sizes());
  REQUIRE(mix_experts(c.x, c.chosen, c.weights, c.experts()).equal(dense));
}

TEST_CASE("experts: tokens that travel give the bits of one device", "[experts]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 3, 4}) {
      CAPTURE(transport, ranks);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"ep"});
            for (const auto dtype : {at::kDouble, at::kFloat}) {
              const auto c = mix_case({.experts = ranks == 4 ? 8 : 6}, true, dtype);
              const auto expected = one_device(c);
              check_same(on_mesh(c, mesh, {shard(0)}, {shard(0)}), expected, 0, "tokens cut along the batch");
              check_same(on_mesh(c, mesh, {shard(1)}, {shard(0)}), expected, 0, "tokens cut along positions");
              check_same(on_mesh(c, mesh, {replicate()}, {shard(0)}), expected, 0, "whole tokens");
            }
          },
          transport));
    }
  }
}

TEST_CASE("experts: routing that is as uneven as can be", "[experts]") {
  const auto check = [](const DeviceMesh& mesh, const MixCase& c, const std::string& what) {
    const auto expected = one_device(c);
    for (const auto* dispatch : {"alltoall", "deduplicated", "allgather", "automatic"}) {
      const bool travels = dispatch == std::string("alltoall");
      check_same(on_mesh(c, mesh, {shard(0)}, {shard(0)}, {.dispatch = dispatch}), expected, travels ? 0 : 1e-13, what);
    }
  };
  for (const std::string transport : {"threads", "shm"}) {
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {4}, {"ep"});
          auto c = mix_case({.experts = 8});
          c.chosen.select(-1, 0).fill_(5), c.chosen.select(-1, 1).fill_(-1);
          check(mesh, c, "all to one expert");
          c.chosen.fill_(-1);
          check(mesh, c, "none to any");
          check(mesh, mix_case({.tokens = {2, 3}, .experts = 8}), "ranks without tokens");
          check(mesh, mix_case({.tokens = {1, 1}, .experts = 8, .k = 1}), "one token");
          check(mesh, mix_case({.tokens = {3, 5}, .experts = 6}), "ranks with fewer experts, and one with none");
          check(mesh, mix_case({.tokens = {3, 5}, .experts = 4, .k = 4}), "every token to every expert");
        },
        transport));
  }
}

TEST_CASE("experts: every way of cutting them gives the numbers of one device", "[experts]") {
  const auto check_all = [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2, 2}, {"dp", "ep", "tp"});
    const auto c = mix_case({.tokens = {4, 6}, .hidden = 6, .experts = 8});
    const auto expected = one_device(c);
    const Placement b = shard(0), l = shard(1), r = replicate(), s = shard(0), h = shard(1);
    for (const auto* dispatch : {"alltoall", "deduplicated", "allgather"}) {
      const auto check = [&](const Placements& tokens, const Placements& weights) {
        check_same(on_mesh(c, mesh, tokens, weights, {.dispatch = dispatch}), expected, 1e-13,
                   fmt::format("{} {} {}", dispatch, str(tokens), str(weights)));
      };
      check({b, b, r}, {r, s, r});  // dp x ep, tp idle
      check({b, b, r}, {r, s, h});  // each expert cut over tp
      check({b, b, l}, {r, s, h});  // and positions too
      check({b, b, l}, {r, s, s});  // experts over ep x tp
      check({b, l, l}, {s, s, s});  // over all ranks
      check({b, r, r}, {s, r, s});  // over ranks that are no neighbours, tokens whole along one
      check({r, r, r}, {r, s, h});
      check({r, r, r}, {r, r, r});
      check({b, partial(), shard(2)}, {r, s, r});
      check({b, b, l}, {h, s, r});
    }
  };
  for (const std::string transport : {"threads", "shm"}) REQUIRE_NOTHROW(on_ranks(8, check_all, transport));
}

}  // namespace dtensor::test::experts
