// Copies of busy experts, for inference: which experts have how many, and on which ranks they lie (DeepSeek-AI, "EPLB", 2025).
//
//   auto plan = dt::expert::plan_copies(counts, {.ranks = 8, .slots = 72});         // counts[layer][expert]: tokens so far
//   auto chosen = dt::expert::slots_of(routing.experts, plan[layer]);               // each token's copies
//   auto w1 = dt::expert::copied(experts->w1, plan[layer]);                         // [slots, hidden, dim], cut as experts are
#pragma once

#include <dtensor/base/error.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::expert {

struct CopiesOptions {
  int64_t ranks = 1;
  int64_t slots = 0;  // copies on all ranks together: a multiple of the ranks, and as many as experts at least
  // Hierarchical: experts lie in so many groups of neighbours, of which a node has all or nothing. Where the nodes divide the groups,
  // groups are put on nodes first, and experts are copied within their node. Else copies lie anywhere.
  int64_t nodes = 1, groups = 1;
};

struct LayerCopies {
  std::vector<int64_t> expert_of;              // of each slot; rank r has slots [r n, r n + n), n = slots / ranks
  std::vector<std::vector<int64_t>> slots_of;  // of each expert, ascending
  double before = 1, after = 1;                // the busiest rank's load over the mean: of experts in their order, and of this
};

// counts[layer][expert]: the load of each expert, 0 or more. An expert's load is shared alike by its copies. Throws for sizes that do not
// fit together and loads below 0.
std::vector<LayerCopies> plan_copies(const std::vector<std::vector<double>>& counts, const CopiesOptions& options);

// `chosen` int64 [..., k]: the experts of tokens, -1: none -> their slots. Token t takes copy t mod copies.
at::Tensor slots_of(const at::Tensor& chosen, const LayerCopies& layer);

// A weight [experts, ...] -> [slots, ...].
at::Tensor copied(const at::Tensor& weight, const LayerCopies& layer);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace planning {

using Loads = std::vector<double>;
using Indices = std::vector<int64_t>;

inline double most_over_mean(const Loads& loads) {
  const auto sum = std::accumulate(loads.begin(), loads.end(), 0.0);
  return sum > 0 ? *std::ranges::max_element(loads) * static_cast<double>(loads.size()) / sum : 1;
}

// How many copies each expert has, of `slots`: one, and one more for whose copies are busiest until none is left. No other numbers make the
// busiest copy less busy.
inline Indices numbers_of_copies(const Loads& loads, int64_t slots) {
  Indices copies(loads.size(), 1);
  for (auto left = slots - static_cast<int64_t>(loads.size()); left > 0; --left) {
    const auto of_copy = [&](size_t e) { return loads[e] / static_cast<double>(copies[e]); };
    size_t busiest = 0;
    for (size_t e = 1; e < loads.size(); ++e) {
      if (of_copy(e) > of_copy(busiest)) busiest = e;
    }
    ++copies[busiest];
  }
  return copies;
}

// Two things of two packs change places while that makes the busier one of them less busy.
inline bool improve(const Loads& loads, std::vector<Indices>& packs, Loads& of_packs) {
  const auto busiest = std::ranges::max_element(of_packs) - of_packs.begin();
  for (size_t other = 0; other < packs.size(); ++other) {
    const auto gap = of_packs[busiest] - of_packs[other];
    for (auto& mine : packs[busiest]) {
      for (auto& theirs : packs[other]) {
        const auto moved = loads[mine] - loads[theirs];
        if (moved <= gap * 1e-12 || moved >= gap * (1 - 1e-12)) continue;
        std::swap(mine, theirs);
        of_packs[busiest] -= moved, of_packs[other] += moved;
        return true;
      }
    }
  }
  return false;
}

// As many things to each pack, so that packs are about equally busy: the busiest thing first, to the least busy pack with room.
inline std::vector<Indices> packed(const Loads& loads, int64_t packs) {
  const auto room = loads.size() / static_cast<size_t>(packs);
  std::vector<Indices> result(packs);
  Loads of_packs(packs, 0.0);
  Indices order(loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return loads[a] > loads[b]; });
  for (const auto thing : order) {
    int64_t best = -1;
    for (int64_t p = 0; p < packs; ++p) {
      if (result[p].size() < room && (best < 0 || of_packs[p] < of_packs[best])) best = p;
    }
    result[best].push_back(thing);
    of_packs[best] += loads[thing];
  }
  for (size_t i = 0; i < 16 * loads.size() && improve(loads, result, of_packs); ++i) {}
  return result;
}

// Of the experts `own`, copied to fill the slots of some ranks: the expert of each slot.
inline Indices filled(const Loads& loads, const Indices& own, int64_t ranks, int64_t slots) {
  Loads of_own, of_copies;
  for (const auto e : own) of_own.push_back(loads[e]);
  const auto numbers = numbers_of_copies(of_own, slots);
  Indices expert_of_copy, result;
  for (size_t i = 0; i < own.size(); ++i) {
    for (int64_t c = 0; c < numbers[i]; ++c) {
      expert_of_copy.push_back(own[i]);
      of_copies.push_back(of_own[i] / static_cast<double>(numbers[i]));
    }
  }
  for (auto& pack : packed(of_copies, ranks)) {
    std::ranges::sort(pack);
    for (const auto copy : pack) result.push_back(expert_of_copy[copy]);
  }
  return result;
}

// The experts of each node.
inline std::vector<Indices> experts_of_nodes(const Loads& loads, const CopiesOptions& o) {
  const auto experts = static_cast<int64_t>(loads.size()), each = experts / o.groups;
  const bool hierarchical = o.nodes > 1 && o.groups % o.nodes == 0;
  if (!hierarchical) {
    Indices all(experts);
    std::iota(all.begin(), all.end(), 0);
    return {all};
  }
  Loads of_groups;
  for (int64_t g = 0; g < o.groups; ++g) of_groups.push_back(std::accumulate(&loads[g * each], &loads[g * each] + each, 0.0));
  std::vector<Indices> result;
  for (auto& groups : packed(of_groups, o.nodes)) {
    std::ranges::sort(groups);
    auto& node = result.emplace_back();
    for (const auto g : groups) {
      for (auto e = g * each; e < (g + 1) * each; ++e) node.push_back(e);
    }
  }
  return result;
}

inline void check(const Loads& loads, const CopiesOptions& o) {
  const auto experts = static_cast<int64_t>(loads.size());
  require(experts >= 1, "plan_copies", "got a layer without experts; expected at least one");
  require(o.ranks >= 1 && o.slots >= experts && o.slots % o.ranks == 0, "plan_copies",
          "got {} slots on {} ranks for {} experts; expected a multiple of the ranks, and as many as experts at least", o.slots, o.ranks,
          experts);
  require(o.nodes >= 1 && o.ranks % o.nodes == 0 && o.groups >= 1 && experts % o.groups == 0, "plan_copies",
          "got {} nodes of {} ranks, and {} groups of {} experts; expected divisors", o.nodes, o.ranks, o.groups, experts);
  require(std::ranges::all_of(loads, [](double load) { return load >= 0 && load < 1e300; }), "plan_copies",
          "a load is below 0 or not finite; expected counts of tokens");
}

// Of experts in their order, as evenly as ranks can have them.
inline double load_in_order(const Loads& loads, int64_t ranks) {
  Loads of_ranks(ranks, 0.0);
  const auto each = (static_cast<int64_t>(loads.size()) + ranks - 1) / ranks;
  for (size_t e = 0; e < loads.size(); ++e) of_ranks[static_cast<int64_t>(e) / each] += loads[e];
  return most_over_mean(of_ranks);
}

}  // namespace planning

inline std::vector<LayerCopies> plan_copies(const std::vector<std::vector<double>>& counts, const CopiesOptions& o) {
  std::vector<LayerCopies> result;
  for (const auto& loads : counts) {
    planning::check(loads, o);
    auto& layer = result.emplace_back();
    const auto nodes = planning::experts_of_nodes(loads, o);
    const auto parts = static_cast<int64_t>(nodes.size());
    for (const auto& own : nodes) {
      const auto slots = planning::filled(loads, own, o.ranks / parts, o.slots / parts);
      layer.expert_of.insert(layer.expert_of.end(), slots.begin(), slots.end());
    }
    layer.slots_of.resize(loads.size());
    for (size_t s = 0; s < layer.expert_of.size(); ++s) layer.slots_of[layer.expert_of[s]].push_back(static_cast<int64_t>(s));
    planning::Loads of_ranks(o.ranks, 0.0);
    for (size_t s = 0; s < layer.expert_of.size(); ++s) {
      const auto e = layer.expert_of[s];
      of_ranks[static_cast<int64_t>(s) * o.ranks / o.slots] += loads[e] / static_cast<double>(layer.slots_of[e].size());
    }
    layer.before = planning::load_in_order(loads, o.ranks), layer.after = planning::most_over_mean(of_ranks);
  }
  return result;
}

inline at::Tensor slots_of(const at::Tensor& chosen, const LayerCopies& layer) {
  const auto experts = static_cast<int64_t>(layer.slots_of.size());
  size_t most = 1;
  for (const auto& slots : layer.slots_of) most = std::max(most, slots.size());
  std::vector<int64_t> table, numbers;  // [experts + 1, most]; last, of none
  for (const auto& slots : layer.slots_of) {
    numbers.push_back(static_cast<int64_t>(slots.size()));
    for (size_t i = 0; i < most; ++i) table.push_back(slots[i % slots.size()]);
  }
  numbers.push_back(1), table.insert(table.end(), most, -1);
  const auto here = [&](const std::vector<int64_t>& list) { return at::tensor(list, at::kLong).to(chosen.device()); };
  const auto known = chosen.masked_fill(chosen.lt(0), experts);
  auto tokens = known.sizes().vec();
  tokens.back() = 1;
  const auto token = at::arange(c10::multiply_integers(tokens), known.options().dtype(at::kLong)).view(tokens);
  const auto looked_up = [&](const std::vector<int64_t>& list, const at::Tensor& index) {
    return at::embedding(here(list).view({-1, 1}), index).squeeze(-1);
  };
  return looked_up(table, known.mul(static_cast<int64_t>(most)).add(token.remainder(looked_up(numbers, known))));
}

inline at::Tensor copied(const at::Tensor& weight, const LayerCopies& layer) {
  return weight.index_select(0, at::tensor(layer.expert_of, at::kLong).to(weight.device()));
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
