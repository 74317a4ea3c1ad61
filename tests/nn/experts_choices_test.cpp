// Experts that choose tokens, tokens that choose by their numbers, and experts of fewer numbers than the model's.
#include "tests/support/experts_training.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/observe/comm_debug.hpp>

#include <numeric>
#include <set>

namespace dtensor::test::experts {

namespace {

std::vector<int64_t> whole_numbers(const at::Tensor& x) {
  const auto flat = x.reshape({-1}).contiguous();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

nn::MoEOptions choosing(const std::string& by) {
  return options_of([&](auto& o) { o.router.choose_by = by; });
}

// [kBatch, kLength], the same on every rank.
at::Tensor token_ids() {
  const NoSpmd plain;
  return (torch::arange(kBatch * kLength) * 37).remainder(23).view({kBatch, kLength});
}

// The result of a layer of seed 5 and the gradients of its parameters.
std::vector<at::Tensor> layer_pass(const nn::MoEOptions& options, const std::function<void(nn::MoE&)>& lay_out, const Place& place) {
  torch::manual_seed(5);
  nn::MoE moe(options);
  moe->to(torch::kDouble);
  lay_out(moe);
  at::Tensor x;
  {
    const NoSpmd plain;
    x = torch::sin(torch::arange(kBatch * kLength * kDim, torch::kDouble)).view({kBatch, kLength, kDim});
  }
  const auto y = options.router.choose_by == "hash" ? moe(place(x), place(token_ids())) : moe(place(x));
  (y * place(x)).sum().backward();
  std::vector<at::Tensor> results{full_tensor(y.detach()), moe->counts()};
  for (const auto& p : moe->parameters()) results.push_back(full_tensor(p.grad().defined() ? p.grad() : torch::zeros_like(p)));
  return results;
}

std::vector<at::Tensor> pass_here(const nn::MoEOptions& options) {
  const NoSpmd plain;
  return layer_pass(options, [](nn::MoE&) {}, [](const at::Tensor& x) { return x; });
}

}  // namespace

TEST_CASE("choices: each expert takes its best tokens of the batch", "[experts]") {
  torch::manual_seed(2);
  const auto logits = torch::randn({3, 5, 4}, torch::kDouble);
  const auto routing = nn::route(logits, {.top_k = 2, .normalize = false, .choose_by = "experts"});
  const auto scores = logits.view({15, 4}).softmax(-1), chosen = routing.experts.view({15, 4});
  for (int64_t e = 0; e < 4; ++e) {
    std::vector<int64_t> order(15);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return scores[a][e].item<double>() > scores[b][e].item<double>(); });
    for (int64_t i = 0; i < 15; ++i) {
      const bool taken = i < 8;  // ceil(15 tokens x 2 / 4 experts)
      REQUIRE(chosen[order[i]][e].item<int64_t>() == (taken ? e : -1));
      const auto weight = routing.weights.view({15, 4})[order[i]][e].item<double>();
      REQUIRE(weight == (taken ? routing.scores.view({15, 4})[order[i]][e].item<double>() : 0));
    }
  }
  const auto counts = nn::tokens_per_expert(routing.experts, routing.scores);
  REQUIRE(whole_numbers(counts) == std::vector<int64_t>(4, 8));
  const auto equal = nn::chosen_by_experts(torch::zeros({4, 2}), 2);
  REQUIRE(whole_numbers(equal) == std::vector<int64_t>{0, 1, 0, 1, -1, -1, -1, -1});
  REQUIRE_THROWS_WITH(nn::chosen_by_experts(torch::zeros({4, 2}), 5), says("to take 5 tokens of 4"));
  REQUIRE_THROWS_WITH(nn::route(logits, {.groups = 2, .choose_by = "experts"}), says("groups limit what a token chooses"));
}

TEST_CASE("choices: a hash gives a token the same experts everywhere and spreads tokens out", "[experts]") {
  const auto ids = torch::arange(12000);
  for (const int64_t k : {1, 3, 6}) {
    const auto chosen = nn::chosen_by_hash(ids, 6, k);
    for (int64_t t = 0; t < 200; ++t) {
      const auto of_token = whole_numbers(chosen[t]);
      REQUIRE(std::set<int64_t>(of_token.begin(), of_token.end()).size() == static_cast<size_t>(k));
      REQUIRE(chosen[t].equal(nn::chosen_by_hash(ids.narrow(0, t, 1), 6, k)[0]));
    }
    const auto counts = torch::bincount(chosen.view({-1}), {}, 6).to(torch::kDouble);
    REQUIRE(counts.numel() == 6);
    REQUIRE((counts.max() / counts.mean()).item<double>() < 1.1);
  }
  // Neighbours go apart: pairs of consecutive tokens meet in one expert as seldom as others.
  const auto one = nn::chosen_by_hash(ids, 6, 1).view({-1});
  const auto meetings = one.narrow(0, 1, 11999).eq(one.narrow(0, 0, 11999)).to(torch::kDouble).mean().item<double>();
  REQUIRE(std::abs(meetings - 1.0 / 6) < 0.02);
  const auto routing = nn::route(torch::randn({5, 6}), {.top_k = 1, .choose_by = "hash"}, {}, ids.narrow(0, 7, 5));
  REQUIRE((routing.weights - 1).abs().max().item<double>() < 1e-6);
  REQUIRE_THROWS_WITH(nn::route(torch::randn({5, 6}), {.choose_by = "hash"}), says("needs the tokens' numbers"));
  REQUIRE_THROWS_WITH(nn::chosen_by_hash(ids.to(torch::kInt), 6, 1), says("numbered by int64"));
}

TEST_CASE("choices: of no tokens there are none to choose", "[experts]") {
  const auto routing = nn::route(torch::zeros({0, 4}), {.top_k = 2, .choose_by = "experts"});
  CHECK(routing.experts.sizes() == at::IntArrayRef({0, 4}));
  CHECK_THROWS_WITH(nn::chosen_by_experts(torch::zeros({3, 4}), 0), says("to take 0 tokens of 3"));
}

TEST_CASE("choices: a capacity counts no row of no expert", "[experts]") {
  const auto chosen = torch::tensor({0, -1, -1, 1, 0, 1, 0, -1}, torch::kLong).view({4, 2});
  const auto weights = torch::tensor({.1, 0., 0., .9, .2, .8, .3, 0.}, torch::kDouble).view({4, 2});
  REQUIRE(whole_numbers(nn::limit_to_capacity(chosen, weights, 2, 2)) == std::vector<int64_t>{0, -1, -1, 1, 0, 1, -1, -1});
  REQUIRE(whole_numbers(nn::limit_to_capacity(chosen, weights, 2, 1, "probability")) ==
          std::vector<int64_t>{-1, -1, -1, 1, -1, -1, 0, -1});
}

TEST_CASE("choices: on any mesh they are those of one device", "[experts]") {
  for (const auto& [name, options] : std::vector<std::pair<std::string, nn::MoEOptions>>{
           {"experts choose", choosing("experts")},
           {"hashes", choosing("hash")},
           {"latent", options_of([](auto& o) { o.latent = 3, o.shared_hidden = 4; })}}) {
    const auto expected = pass_here(options);
    for (const std::string transport : {"threads", "shm"}) {
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&, what = name, o = options](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "ep"});
            for (const auto* dispatch : {"alltoall", "deduplicated", "allgather"}) {
              const Spmd spmd(mesh);
              const auto got = layer_pass(o, [&](nn::MoE& moe) { expert_parallel(*moe, mesh, {.dispatch = dispatch}); },
                                    [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0), shard(1)}).tensor(); });
              const NoSpmd plain;
              for (size_t i = 0; i < expected.size(); ++i) {
                const auto difference = (got[i] - expected[i]).abs().max().item<double>();
                require(difference < 1e-12, "test", "{} by {}: result {} differs by {}", what, dispatch, i, difference);
              }
            }
          },
          transport));
    }
  }
}

TEST_CASE("choices: experts that choose and latent ones train with the numbers of one device", "[experts]") {
  const auto latent = options_of([](auto& o) { o.latent = 3, o.balance_loss = 0.3; });
  auto choose = choosing("experts");
  choose.capacity_factor = 0.9, choose.drop = "probability";
  for (const auto& options : {choose, latent}) {
    const auto expected = on_one_device(options);
    REQUIRE_NOTHROW(check(on_one_device(options, true), expected, "computed again", 0));
    REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "ep"});
      check_on(mesh, options, {{shard(0), shard(1)}, {}, "dp"}, expected, "fully sharded");
    }));
  }
}

TEST_CASE("choices: latent experts send fewer numbers", "[experts]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
    const auto bytes = [&](int64_t latent) {
      const Spmd spmd(mesh);
      CommDebugMode counted;
      layer_pass(options_of([&](auto& o) { o.latent = latent; }), [&](nn::MoE& moe) { expert_parallel(*moe, mesh); },
           [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor().requires_grad_(); });
      return counted.bytes(comm::Collective::all_to_all);
    };
    const auto all = bytes(0), fewer = bytes(2);
    require(fewer * 4 == all, "test", "sent {} and {} bytes", all, fewer);
  }));
}

}  // namespace dtensor::test::experts
