// How operands of mix_experts are to lie for their ranks to compute, and which ranks exchange rows. Made once for equal layouts.
#pragma once

#include <dtensor/mesh/world.hpp>
#include <dtensor/parallel/expert/exchange.hpp>
#include <dtensor/parallel/expert/feed_forward.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor::expert {

struct Plan {
  DeviceMesh mesh;
  std::vector<int64_t> expert_dims;  // of the mesh, which cut the weights along their experts
  Placements tokens, w1, w2, out;
  bool exchanges = false;  // rows travel
  Interval own = {};       // this rank's experts
  std::optional<Group> group = {};  // where rows travel
};

// For x and weights of which one or both are DTensors; dispatch: alltoall, deduplicated or allgather. Kept in this rank's world for equal
// mesh, placements and sizes. Communicates nothing. Throws for weights that are cut in another way, naming `layer`.
std::shared_ptr<const Plan> plan_for(const at::Tensor& x, const at::Tensor& w1, const std::string& dispatch, std::string_view layer);

// -- How ------------------------------------------------------------------------------------------------------------------

// The token dim that is longest on a rank: there tokens are cut that lie whole.
inline int64_t dim_to_cut(const at::Tensor& x, const Placements& now, const DeviceMesh& mesh) {
  int64_t best = 0;
  double longest = -1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    auto length = static_cast<double>(x.size(d));
    for (int64_t m = 0; m < mesh.ndim(); ++m) {
      if (now[m].is_shard(d)) length /= static_cast<double>(mesh.size(m));
    }
    if (length > longest) longest = length, best = d;
  }
  return best;
}

inline void check_cut(const Placement& placement, std::string_view layer, const Layout& layout) {
  const bool known = placement.is_replicate() || placement.is_flat() || (placement.is_shard(0) && placement.cut().split == 1) ||
                     placement.is_shard(1);
  require(known, "mix_experts", "{}: weights are cut along their experts (dim 0) or their hidden width; got w1 {}; hint: "
          "dt::expert_parallel cuts them", layer, layout.str());
}

inline Plan plan_of(const at::Tensor& x, const at::Tensor& w1, bool gathers, std::string_view layer) {
  const auto* of_w = find_layout(w1);
  const auto* of_x = find_layout(x);
  Plan plan{of_w ? of_w->mesh() : of_x->mesh(), {}, {}, {}, {}, {}, false};
  const auto ndim = plan.mesh.ndim();
  const Placements whole(ndim, replicate());
  const auto now = of_x ? Placements(of_x->placements().begin(), of_x->placements().end()) : whole;
  const auto cut = of_w ? Placements(of_w->placements().begin(), of_w->placements().end()) : whole;
  plan.tokens = plan.w1 = plan.w2 = plan.out = whole;
  for (int64_t m = 0; m < ndim; ++m) {
    if (of_w) check_cut(cut[m], layer, *of_w);
    const bool by_tokens = now[m].is_shard() && now[m].dim + 1 < x.dim();
    if (by_tokens) plan.tokens[m] = now[m];
    if (!cut[m].is_shard() || plan.mesh.size(m) == 1) {
      plan.out[m] = plan.tokens[m];
      continue;
    }
    const bool by_experts = cut[m].dim == 0, exchanges = by_experts && !gathers;
    plan.w1[m] = cut[m];
    plan.w2[m] = by_experts ? cut[m] : shard(2, cut[m].cut());
    if (by_experts) plan.expert_dims.push_back(m);
    if (exchanges && !by_tokens) plan.tokens[m] = shard(dim_to_cut(x, plan.tokens, plan.mesh));
    if (!exchanges) plan.tokens[m] = replicate();
    plan.out[m] = exchanges ? plan.tokens[m] : partial();
    plan.exchanges |= exchanges;
  }
  return plan;
}

// The ranks that differ from this one along some dimensions of a mesh, in the order of the mesh, and their coordinates.
struct RanksAlong {
  std::vector<int> ranks;
  std::vector<std::vector<int64_t>> coordinates;
};
inline RanksAlong ranks_along(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  RanksAlong found;
  const auto own = mesh.coordinate();
  for (int64_t i = 0; i < mesh.size(); ++i) {
    auto coordinate = mesh.coordinate_of(i);
    bool beside = true;
    for (int64_t m = 0; m < mesh.ndim(); ++m) beside &= coordinate[m] == own[m] || std::ranges::find(dims, m) != dims.end();
    if (!beside) continue;
    found.ranks.push_back(mesh.ranks()[i]);
    found.coordinates.push_back(std::move(coordinate));
  }
  return found;
}

inline Interval experts_at(const at::Tensor& w1, const Plan& plan, c10::IntArrayRef coordinate) {
  const auto layout = Layout::get(plan.mesh, plan.w1, w1.sizes(), w1.scalar_type());
  const auto held = layout->intervals(0, coordinate);
  return held.empty() ? Interval{0, 0} : Interval{held.front().begin, held.back().end};
}

inline Group group_of(const at::Tensor& x, const at::Tensor& w1, const Plan& plan) {
  const auto [ranks, coordinates] = ranks_along(plan.mesh, plan.expert_dims);
  std::string along;
  for (const auto m : plan.expert_dims) along += (along.empty() ? "" : "+") + plan.mesh.names()[m];
  Group group{{plan.mesh.device_type(), ranks, {static_cast<int64_t>(ranks.size())}, {along}}, {0}, {}};
  const auto tokens = Layout::get(plan.mesh, plan.tokens, x.sizes().slice(0, x.dim() - 1), x.scalar_type());
  for (const auto& coordinate : coordinates) {
    group.first_expert.push_back(group.first_expert.back() + experts_at(w1, plan, coordinate).length());
    const auto runs = tokens->runs(coordinate);
    group.tokens.emplace_back(runs.begin(), runs.end());
  }
  return group;
}

struct Plans {
  struct Key {
    const void* mesh;
    Placements x, w1;  // empty: a plain tensor
    Sizes x_sizes, w1_sizes;
    bool gathers;
    bool operator==(const Key&) const = default;
  };
  static constexpr size_t kMost = 64;
  std::mutex mutex;
  std::vector<std::pair<Key, std::shared_ptr<const Plan>>> known;
};

inline std::shared_ptr<const Plan> plan_for(const at::Tensor& x, const at::Tensor& w1, const std::string& dispatch,
                                            std::string_view layer) {
  const auto *of_x = find_layout(x), *of_w = find_layout(w1);
  const auto placements = [](const Layout* layout) {
    return layout ? Placements(layout->placements().begin(), layout->placements().end()) : Placements();
  };
  const auto sizes = [](const at::Tensor& t) { return Sizes(t.sizes().begin(), t.sizes().end()); };
  const auto& mesh = of_w ? of_w->mesh() : of_x->mesh();
  Plans::Key key{mesh.id(), placements(of_x), placements(of_w), sizes(x), sizes(w1), dispatch == "allgather"};
  auto& plans = mesh.world().local<Plans>();
  {
    const std::lock_guard lock(plans.mutex);
    for (const auto& [known, plan] : plans.known) {
      if (known == key) return plan;
    }
  }
  auto plan = std::make_shared<Plan>(plan_of(x, w1, key.gathers, layer));
  plan->own = experts_at(w1, *plan, plan->mesh.coordinate());
  if (plan->exchanges) plan->group = group_of(x, w1, *plan);
  const std::lock_guard lock(plans.mutex);
  if (plans.known.size() >= Plans::kMost) plans.known.clear();
  plans.known.emplace_back(std::move(key), plan);
  return plan;
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
