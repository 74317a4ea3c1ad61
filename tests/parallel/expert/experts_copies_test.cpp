// Copies of busy experts: plans against the best of all plans, and mixtures that use them.
#include "tests/support/experts_support.hpp"

#include <dtensor/parallel/expert/copies.hpp>

#include <functional>
#include <random>

namespace dtensor::test::experts {

namespace {

using Loads = std::vector<double>;
using LaidOut = std::function<at::Tensor(const at::Tensor&)>;

// The least load of the busiest copy over all numbers of copies.
double best_copies(const Loads& loads, int64_t slots, size_t from = 0) {
  const auto rest = static_cast<int64_t>(loads.size() - from) - 1;
  if (rest == 0) return loads[from] / static_cast<double>(slots);
  double best = 1e300;
  for (int64_t n = 1; n + rest <= slots; ++n) {
    best = std::min(best, std::max(loads[from] / static_cast<double>(n), best_copies(loads, slots - n, from + 1)));
  }
  return best;
}

// The least load of the busiest pack, over all ways to put as many things to each.
double best_packs(const Loads& loads, Loads& packs, std::vector<size_t>& room, size_t from = 0) {
  if (from == loads.size()) return *std::ranges::max_element(packs);
  double best = 1e300;
  for (size_t p = 0; p < packs.size(); ++p) {
    if (room[p] == 0) continue;
    --room[p], packs[p] += loads[from];
    best = std::min(best, best_packs(loads, packs, room, from + 1));
    ++room[p], packs[p] -= loads[from];
  }
  return best;
}

Loads random_loads(size_t experts, std::mt19937& random) {
  Loads loads;
  std::lognormal_distribution<double> draw(3, 1);
  for (size_t e = 0; e < experts; ++e) loads.push_back(std::floor(draw(random)));
  return loads;
}

}  // namespace

TEST_CASE("copies: their numbers make the busiest copy as little busy as can be", "[experts]") {
  std::mt19937 random(3);
  for (int i = 0; i < 40; ++i) {
    const auto loads = random_loads(4, random);
    for (const int64_t slots : {4, 6, 9}) {
      const auto numbers = expert::planning::numbers_of_copies(loads, slots);
      double busiest = 0;
      for (size_t e = 0; e < loads.size(); ++e) busiest = std::max(busiest, loads[e] / static_cast<double>(numbers[e]));
      REQUIRE(std::accumulate(numbers.begin(), numbers.end(), int64_t{0}) == slots);
      REQUIRE(busiest == best_copies(loads, slots));
    }
  }
}

TEST_CASE("copies: packs are nearly as even as the best ones", "[experts]") {
  std::mt19937 random(4);
  double sum = 0, worst = 0;
  for (int i = 0; i < 100; ++i) {
    const auto loads = random_loads(8, random);
    for (const int64_t packs : {2, 4}) {
      double busiest = 0;
      for (const auto& pack : expert::planning::packed(loads, packs)) {
        REQUIRE(pack.size() == loads.size() / packs);
        double load = 0;
        for (const auto thing : pack) load += loads[thing];
        busiest = std::max(busiest, load);
      }
      Loads of_packs(packs, 0.0);
      std::vector<size_t> room(packs, loads.size() / packs);
      const auto ratio = busiest / best_packs(loads, of_packs, room);
      sum += ratio, worst = std::max(worst, ratio);
    }
  }
  CAPTURE(sum / 200, worst);
  REQUIRE(worst < 1.2);
  REQUIRE(sum / 200 < 1.02);
}

TEST_CASE("copies: a plan has every expert and is more even than none", "[experts]") {
  std::mt19937 random(5);
  std::vector<Loads> counts;
  for (int layer = 0; layer < 8; ++layer) counts.push_back(random_loads(32, random));
  for (const auto& o : std::vector<expert::CopiesOptions>{{.ranks = 8, .slots = 40},
                                                          {.ranks = 8, .slots = 48, .nodes = 2, .groups = 8},
                                                          {.ranks = 8, .slots = 48, .nodes = 4, .groups = 2},
                                                          {.ranks = 1, .slots = 32}}) {
    const auto plan = expert::plan_copies(counts, o);
    REQUIRE(plan.size() == counts.size());
    double before = 0, after = 0;
    for (const auto& layer : plan) {
      REQUIRE(layer.expert_of.size() == static_cast<size_t>(o.slots));
      for (int64_t e = 0; e < 32; ++e) {
        REQUIRE(!layer.slots_of[e].empty());
        for (const auto s : layer.slots_of[e]) REQUIRE(layer.expert_of[s] == e);
      }
      before += layer.before / 8, after += layer.after / 8;
      if (o.groups % o.nodes != 0 || o.nodes == 1) continue;
      for (int64_t g = 0; g < o.groups; ++g) {  // a group lies on one node
        for (int64_t e = g * 4; e < g * 4 + 4; ++e) {
          for (const auto s : layer.slots_of[e]) REQUIRE(s / (o.slots / o.nodes) == layer.slots_of[g * 4][0] / (o.slots / o.nodes));
        }
      }
    }
    CAPTURE(o.ranks, o.nodes, o.groups, before, after);
    REQUIRE(after <= before);
    if (o.ranks == 8) REQUIRE(before > 1.5);
    if (o.ranks == 8 && o.nodes != 2) REQUIRE(after < 1.15);
  }
}

TEST_CASE("copies: what does not fit is refused in words", "[experts]") {
  const std::vector<Loads> counts{{1, 2, 3, 4}};
  REQUIRE_THROWS_WITH(expert::plan_copies(counts, {.ranks = 2, .slots = 3}), says("got 3 slots on 2 ranks for 4 experts"));
  REQUIRE_THROWS_WITH(expert::plan_copies(counts, {.ranks = 3, .slots = 5}), says("got 5 slots on 3 ranks"));
  REQUIRE_THROWS_WITH(expert::plan_copies(counts, {.ranks = 2, .slots = 4, .nodes = 3}), says("got 3 nodes of 2 ranks"));
  REQUIRE_THROWS_WITH(expert::plan_copies({{1, -1}}, {.ranks = 1, .slots = 2}), says("below 0"));
  REQUIRE_THROWS_WITH(expert::plan_copies({{}}, {.ranks = 1, .slots = 2}), says("without experts"));
}

TEST_CASE("copies: a mixture with copies has the numbers of one without", "[experts]") {
  const auto c = mix_case({.tokens = {4, 6}, .experts = 6});
  const auto plan = expert::plan_copies({{10, 1, 1, 7, 1, 2}}, {.ranks = 2, .slots = 8})[0];
  REQUIRE(plan.slots_of[0].size() == 2);
  auto dropped = c;
  {
    const NoSpmd plain;
    dropped.chosen = c.chosen.clone();
    dropped.chosen[0][0][0] = -1;
  }
  const auto expected = mix_experts(dropped.x, dropped.chosen, dropped.weights, dropped.experts()).detach();
  const auto with_copies = [&](const LaidOut& place, const LaidOut& cut) {
    const auto chosen = expert::slots_of(place(dropped.chosen), plan);
    const auto weight = [&](const at::Tensor& w) { return cut(expert::copied(w.detach(), plan)); };
    return mix_experts(place(dropped.x.detach()), chosen, place(dropped.weights.detach()), {weight(c.w1), weight(c.w2), weight(c.w3)});
  };
  const auto as_is = [](const at::Tensor& x) { return x; };
  REQUIRE((with_copies(as_is, as_is) - expected).abs().max().item<double>() < 1e-13);
  for (const std::string transport : {"threads", "shm"}) {
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
          const auto cut = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor(); };
          const Spmd spmd(mesh);
          const auto got = full_tensor(with_copies(cut, cut));
          const NoSpmd plain;
          require((got - expected).abs().max().item<double>() < 1e-13, "test", "copies give other numbers");
        },
        transport));
  }
}

}  // namespace dtensor::test::experts
