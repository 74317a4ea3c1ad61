// Shared experts, which compute while rows travel.
#include "tests/support/experts_support.hpp"
#include "tests/support/refuses.hpp"
#include "tests/support/slow_link.hpp"

#include <dtensor/nn/moe.hpp>

namespace dtensor::test::experts {

namespace {

// A layer on a mesh, with the same numbers wherever it is made.
nn::MoE layer_beside(const nn::MoEOptions& options, const DeviceMesh& mesh, const ExpertParallelOptions& experts, at::ScalarType dtype) {
  torch::manual_seed(5);
  nn::MoE moe(options);
  moe->to(dtype);
  if (mesh.ndim() == 2 && mesh.names()[1] == "tp") {
    parallelize_module(*moe, mesh, {{"shared_experts.w1.weight", {{"tp", shard(0)}}},
                                    {"shared_experts.w3.weight", {{"tp", shard(0)}}},
                                    {"shared_experts.w2.weight", {{"tp", shard(1)}}}});
  }
  expert_parallel(*moe, mesh, experts);
  return moe;
}

// Of the layer as a whole, or in three parts, of which the last computes the shared experts.
MixResult beside_or_after(nn::MoE moe, const at::Tensor& given, const Placements& placements, bool beside) {
  const auto mesh = *Spmd::current();
  moe->zero_grad();
  const auto x = distribute_tensor(given, mesh, placements).tensor().requires_grad_();
  const auto inner = x * 1.5;  // whose gradient is a sum that depends on the order
  const auto of_parts = [&] {
    const auto chosen = moe->choose(inner);
    return moe->finish(moe->experts(chosen.x, chosen.experts, chosen.weights), inner);
  };
  auto leaves = moe->parameters();
  leaves.push_back(x);
  return result_of(beside ? moe(inner) : of_parts(), leaves);
}

}  // namespace

TEST_CASE("beside: shared experts have the same bits while rows travel and after", "[experts]") {
  const nn::MoEOptions plain{.dim = 8, .hidden = 6, .experts = 8, .shared_hidden = 10, .balance_loss = 0.1};
  auto latent = plain, limited = plain;
  latent.latent = 4, limited.capacity_factor = 0.75;
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](World&) {
          const NoSpmd whole;
          torch::manual_seed(2);
          const auto x = torch::randn({4, 6, 8});
          const auto check = [&](const DeviceMesh& mesh, const Placements& placements, const nn::MoEOptions& options,
                                 const ExpertParallelOptions& experts, const std::string& what) {
            const Spmd spmd(mesh);
            auto moe = layer_beside(options, mesh, experts, at::kFloat);
            const auto expected = beside_or_after(moe, x, placements, false);
            check_same(beside_or_after(moe, x, placements, true), expected, 0, what);
          };
          const auto ep = init_device_mesh(c10::kCPU, {4}, {"ep"}), tp = init_device_mesh(c10::kCPU, {2, 2}, {"ep", "tp"});
          for (const auto& options : {plain, latent, limited}) {
            check(ep, {shard(0)}, options, {}, "sent");
            check(ep, {shard(1)}, options, {.tiles = 3, .put = true}, "put in tiles");
            check(ep, {shard(0)}, options, {.dispatch = "deduplicated", .rows = "bfloat16"}, "deduplicated");
            check(ep, {shard(0)}, options, {.dispatch = "deduplicated", .tiles = 2}, "deduplicated in tiles");
            check(ep, {shard(0)}, options, {.dispatch = "allgather"}, "gathered");
            check(ep, {replicate()}, options, {}, "whole");
            check(tp, {shard(0), shard(1)}, options, {.dims = {"ep", "tp"}}, "with a shared layer that communicates");
            check(tp, {shard(0), replicate()}, options, {.hidden = "tp"}, "with experts that are cut");
            check(tp, {shard(0), replicate()}, options, {.dims = {}}, "with experts that are everywhere");
          }
        },
        transport));
  }
}

TEST_CASE("beside: work of the caller is done once", "[experts]") {
  const auto c = mix_case();
  int calls = 0;
  mix_experts(c.x, c.chosen, c.weights, c.experts(), {}, [&] { ++calls; });
  REQUIRE(calls == 1);
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int64_t tiles : {1, 3}) {
      CAPTURE(transport, tiles);
      REQUIRE_NOTHROW(on_ranks(
          2,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
            const Spmd spmd(mesh);
            const auto lay = [&](const at::Tensor& x) { return distribute_tensor(x.detach(), mesh, {shard(0)}).tensor(); };
            const auto x = lay(c.x), chosen = lay(c.chosen), weights = lay(c.weights);
            const expert::Weights w{lay(c.w1), lay(c.w2), lay(c.w3)};
            const auto fails = [](const std::string& why) { return [why] { fail("test", "{}", why); }; };
            for (const bool put : {false, true}) {
              refuses("the shared layer fails",
                      [&] { mix_experts(x, chosen, weights, w, {.tiles = tiles, .put = put}, fails("the shared layer fails")); });
            }
            at::Tensor sum;  // of all ranks' tokens: distributed, and with an exchange of its own
            int times = 0;
            const auto y = mix_experts(x, chosen, weights, w, {.tiles = tiles, .put = true}, [&] { ++times, sum = x.sum(); });
            require(times == 1 && is_dtensor(sum), "test", "called {} times", times);
            const auto expected = full_tensor(mix_experts(x, chosen, weights, w, {.tiles = tiles}));
            const auto got = full_tensor(y), all = full_tensor(sum);
            const NoSpmd plain;
            require(got.equal(expected) && at::allclose(all, c.x.detach().sum()), "test", "other numbers");
          },
          transport));
    }
  }
}

TEST_CASE("beside: the shared layer hides rows on a slow link", "[experts]") {
  const nn::MoEOptions options{.dim = 64, .hidden = 16, .experts = 4, .shared_hidden = 8192};
  Waits after, beside;
  REQUIRE_NOTHROW(on_slow_links(2, 40e-9, [&](World& world, Link& link) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
    const auto x = [&] {
      const NoSpmd plain;
      torch::manual_seed(2);
      return torch::randn({64, 8, 64});
    }();
    const Spmd spmd(mesh);
    auto moe = layer_beside(options, mesh, {}, at::kFloat);
    after.take(world, link, [&] { beside_or_after(moe, x, {shard(0)}, false); });
    beside.take(world, link, [&] { beside_or_after(moe, x, {shard(0)}, true); });
  }));
  const auto whole = after.median(), left = beside.median();
  REQUIRE(whole.size() == 4);  // rows, results, and the gradients of results and rows
  CAPTURE(whole, left);
  for (const int message : {0, 3}) {
    REQUIRE(whole[message] > 0.0025);  // about 512 rows of 256 bytes take 5.2 ms
    REQUIRE(left.at(message) < 0.2 * whole[message]);
  }
}

}  // namespace dtensor::test::experts
