// How busy experts are: what is counted, and its picture.
#include "tests/support/experts_training.hpp"

#include <dtensor/nn/expert_load.hpp>

namespace dtensor::test::experts {

namespace {

// A pass of a model whose layer takes less than all, and what its experts got.
std::vector<nn::ExpertLoad> load_of(const std::function<void(Net&)>& lay_out, const Place& place) {
  torch::manual_seed(3);
  Net net(options_of([](auto& o) { o.capacity_factor = 0.7; }));
  net->to(torch::kDouble);
  lay_out(net);
  at::Tensor x;
  {
    const NoSpmd plain;
    torch::manual_seed(4);
    x = torch::randn({kBatch, kLength, kDim}, torch::kDouble);
  }
  for (int i = 0; i < 2; ++i) net(place(x)).sum().backward();
  const auto loads = nn::expert_load(*net);
  nn::update_balance(*net);
  require(nn::expert_load(*net).empty(), "test", "update_balance has not counted anew");
  return loads;
}

size_t occurrences(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("load: tokens and drops are counted once on any mesh", "[experts]") {
  const NoSpmd plain;
  const auto expected = load_of([](Net&) {}, [](const at::Tensor& x) { return x; });
  REQUIRE(expected.size() == 1);
  const auto& load = expected[0];
  REQUIRE(load.layer == "moe");
  REQUIRE(load.chosen == 2 * kBatch * kLength * 2);
  const auto capacity = nn::capacity_of(0.7, kBatch * kLength, 2, 8);
  int64_t most = 0, dropped = 0;
  for (const auto tokens : load.tokens) most = std::max(most, tokens), dropped += 2 * std::max<int64_t>(0, tokens / 2 - capacity);
  REQUIRE(dropped > 0);
  REQUIRE(load.dropped == dropped);
  REQUIRE(load.max_over_mean == Approx(static_cast<double>(most) * 8 / static_cast<double>(load.chosen)));
  for (const std::string transport : {"threads", "shm"}) {
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "ep"});
          const Spmd spmd(mesh);
          const auto got = load_of([&](Net& net) { expert_parallel(*net, mesh); },
                                   [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0), shard(1)}).tensor(); });
          require(got.size() == 1 && got[0].tokens == load.tokens && got[0].dropped == load.dropped, "test", "other counts");
        },
        transport));
  }
}

TEST_CASE("load: numbers have names and a picture a box for each expert", "[experts]") {
  const std::vector<nn::ExpertLoad> loads{{"layers.0.<moe>", {4, 4, 4, 4}, 1, 0, 16}, {"layers.1", {0, 2, 4, 10}, 2.5, 4, 16}};
  const auto metrics = nn::metrics_of(loads);
  REQUIRE(metrics.size() == 6);
  REQUIRE(metrics[2] == std::pair<std::string, double>("experts/layers.1/max_over_mean", 2.5));
  REQUIRE(metrics[4] == std::pair<std::string, double>("experts/max_over_mean", 2.5));
  REQUIRE(metrics[5] == std::pair<std::string, double>("experts/dropped", 0.25));
  const auto svg = nn::expert_map(loads);
  REQUIRE(svg.rfind("<svg", 0) == 0);
  REQUIRE(occurrences(svg, "<title>") == 8);
  REQUIRE(occurrences(svg, "#9ecae1") == 5);  // the mean: all of one layer, and one of the other
  REQUIRE(occurrences(svg, "#cb181d") == 1);
  REQUIRE(occurrences(svg, "<moe>") == 0);
  REQUIRE(occurrences(svg, "2.50, 25.0 %") == 1);
  REQUIRE(nn::expert_map({}).rfind("<svg", 0) == 0);
}

}  // namespace dtensor::test::experts
