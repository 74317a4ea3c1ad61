// Finds the cheapest way between two layouts: Dijkstra's algorithm over placements, where an edge is a transition.
//
// A step may change mesh dimension i only if the placements of later mesh dimensions stay valid: none of them shards a tensor dim that the
// step shards or joins, and none is partial in an operation that does not commute with the step's. A flat placement counts as later than
// all others. All ranks find the same plan: it depends on metadata and costs alone, and ties are broken by fewest steps, then by the order
// of placements.
#include "src/mesh/cut_check.hpp"
#include "src/redistribute/transition.hpp"

#include <dtensor/base/error.hpp>

#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_map>

namespace dtensor::redistribute {

namespace {

using MeshDims = c10::SmallVector<int64_t, 4>;

auto order_key(const Placement& p) { return std::make_tuple(p.kind, p.op, p.dim, p.cut(), p.offset); }

// Averages and sums commute; everything else only with itself.
bool commute(ReduceOp a, ReduceOp b) {
  const auto linear = [](ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::avg; };
  return a == b || (linear(a) && linear(b));
}

class Search {
 public:
  Search(const Layout& from, const Layout& to);
  MovePlan run(const LayoutPtr& from, const LayoutPtr& to);

 private:
  // A node is a choice of one candidate per mesh dimension, as a number whose digits (first dimension highest) are the
  // choices.
  using Node = int64_t;
  struct Best {
    int64_t cost = 0, steps = 0;
    Node parent = -1;
    MeshDims mesh_dims;
    auto key() const { return std::make_tuple(cost, steps, parent); }
  };

  Node node_of(PlacementsRef placements) const;
  Placements placements_of(Node node) const;
  bool may_change(PlacementsRef now, c10::IntArrayRef mesh_dims, const Placement& to) const;
  void relax(Node node, PlacementsRef now, const MeshDims& mesh_dims, const Placement& to);
  void expand(Node node);
  void expand_fused(Node node, PlacementsRef now);
  MovePlan plan(Node goal, const LayoutPtr& from, const LayoutPtr& to) const;

  CostModel model_;
  std::vector<std::vector<Placement>> candidates_;  // per mesh dimension, sorted
  std::unordered_map<Node, Best> best_;
  using Entry = std::tuple<int64_t, int64_t, Node>;  // cost, steps, node
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
};

Search::Search(const Layout& from, const Layout& to) : model_(from) {
  best_.reserve(64);
  for (size_t i = 0; i < model_.mesh_sizes.size(); ++i) {
    std::vector<Placement> choices{replicate(), from.placements()[i], to.placements()[i]};
    if (model_.mesh_sizes[i] > 1) {
      for (int64_t d = 0; d < from.ndim(); ++d) choices.push_back(shard(d));
    }
    std::ranges::sort(choices, [](const auto& a, const auto& b) { return order_key(a) < order_key(b); });
    choices.erase(std::ranges::unique(choices).begin(), choices.end());
    candidates_.push_back(std::move(choices));
  }
}

Search::Node Search::node_of(PlacementsRef placements) const {
  Node node = 0;
  for (const auto& [choices, placement] : ranges::views::zip(candidates_, placements)) {
    node = node * static_cast<Node>(choices.size()) + (std::ranges::find(choices, placement) - choices.begin());
  }
  return node;
}

Placements Search::placements_of(Node node) const {
  Placements placements(candidates_.size());
  for (size_t i = candidates_.size(); i-- > 0;) {
    placements[i] = candidates_[i][node % candidates_[i].size()];
    node /= static_cast<Node>(candidates_[i].size());
  }
  return placements;
}

bool Search::may_change(PlacementsRef now, c10::IntArrayRef mesh_dims, const Placement& to) const {
  const auto& from = now[mesh_dims.front()];
  const bool flat = std::ranges::any_of(now, [](const Placement& p) { return p.is_flat(); });
  if (flat && model_.mesh_sizes[mesh_dims.front()] > 1 && (from.is_shard() || to.is_shard())) return false;
  for (int64_t j = mesh_dims.front() + 1; j < static_cast<int64_t>(now.size()); ++j) {
    if (model_.mesh_sizes[j] == 1 || std::ranges::find(mesh_dims, j) != mesh_dims.end()) continue;
    const auto& later = now[j];
    for (const auto& p : {from, to}) {
      if (p.is_shard() && later.is_shard(p.dim)) return false;
      if (p.is_partial() && later.is_partial() && !commute(p.op, later.op)) return false;
    }
  }
  return true;
}

void Search::relax(Node node, PlacementsRef now, const MeshDims& mesh_dims, const Placement& to) {
  if (!may_change(now, mesh_dims, to)) return;
  Placements next(now.begin(), now.end());
  for (int64_t i : mesh_dims) next[i] = to;
  auto normal = next;
  if (detail::normalize(model_.mesh_sizes, normal, model_.sizes).kind != detail::Misfit::none) return;

  const auto& here = best_.at(node);
  Best candidate{here.cost + model_.step(now, mesh_dims, to), here.steps + 1, node, mesh_dims};
  const auto [known, is_new] = best_.try_emplace(node_of(next), candidate);
  if (!is_new) {
    if (known->second.key() <= candidate.key()) return;
    known->second = candidate;
  }
  queue_.emplace(candidate.cost, candidate.steps, known->first);
}

void Search::expand(Node node) {
  const auto now = placements_of(node);
  for (int64_t i = 0; i < static_cast<int64_t>(now.size()); ++i) {
    for (const auto& to : candidates_[i]) {
      const bool free = model_.mesh_sizes[i] == 1 && !(to == now[i]);
      const auto kind = transition(now[i], to);
      if (free || (kind != Transition::none && kind != Transition::impossible)) relax(node, now, {i}, to);
    }
  }
  expand_fused(node, now);
}

// One collective over several mesh dimensions that are placed alike: P -> R, S -> R and P -> S. Pieces of nested shards
// follow each other in group order, unless a split deals them out.
void Search::expand_fused(Node node, PlacementsRef now) {
  const auto ndim = static_cast<int64_t>(now.size());
  for (uint64_t set = 3; set < (uint64_t{1} << ndim); ++set) {
    MeshDims dims;
    for (int64_t i = 0; i < ndim; ++i) {
      if (set >> i & 1) dims.push_back(i);
    }
    const auto& from = now[dims.front()];
    const bool alike =
        std::ranges::all_of(dims, [&](int64_t i) { return model_.mesh_sizes[i] > 1 && now[i] == from; });
    if (dims.size() < 2 || from.is_replicate() || from.split > 1 || !alike) continue;
    for (const auto& to : candidates_[dims.front()]) {
      const bool gathers = to.is_replicate(), scatters = from.is_partial() && to.is_shard() && to.split == 1;
      const bool possible = std::ranges::all_of(dims, [&](int64_t i) {
        return std::ranges::find(candidates_[i], to) != candidates_[i].end();
      });
      if ((gathers || scatters) && possible) relax(node, now, dims, to);
    }
  }
}

MovePlan Search::run(const LayoutPtr& from, const LayoutPtr& to) {
  const Node start = node_of(from->placements()), goal = node_of(to->placements());
  best_[start] = {};
  queue_.emplace(0, 0, start);
  while (!queue_.empty()) {
    const auto [cost, steps, node] = queue_.top();
    queue_.pop();
    if (node == goal) return plan(goal, from, to);
    const auto& best = best_.at(node);
    if (cost == best.cost && steps == best.steps) expand(node);
  }
  fail("redistribute", "found no way from {} to {}", from->str(), to->str());
}

MovePlan Search::plan(Node goal, const LayoutPtr& from, const LayoutPtr& to) const {
  MovePlan plan;
  plan.seconds = static_cast<double>(best_.at(goal).cost) * 1e-12;
  LayoutPtr after = to;
  for (Node node = goal; best_.at(node).parent >= 0;) {
    const auto& best = best_.at(node);
    LayoutPtr before = best_.at(best.parent).parent < 0 ? from : from->with(placements_of(best.parent));
    const auto first = best.mesh_dims.front();
    plan.steps.push_back({best.mesh_dims, before->placements()[first], after->placements()[first], before, after});
    after = std::move(before);
    node = best.parent;
  }
  std::ranges::reverse(plan.steps);
  return plan;
}

}  // namespace

MovePlan find_plan(const LayoutPtr& from, const LayoutPtr& to) { return Search(*from, *to).run(from, to); }

}  // namespace dtensor::redistribute
