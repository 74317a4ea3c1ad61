// Runs a plan on a local tensor, and caches plans.
#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>

#include "src/redistribute/plan_cache.hpp"
#include "src/redistribute/transition.hpp"

#include <dtensor/mesh/two_meshes.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/hash.h>
#include <fmt/ranges.h>

namespace dtensor {

namespace {

using redistribute::Transition;
using PlanPtr = std::shared_ptr<const MovePlan>;

void check_same_tensor(const Layout& from, const Layout& to) {
  if (!(from.mesh() == to.mesh())) {
    fail("redistribute", "cannot move a tensor between meshes; got {} and {}; {}", from.mesh().str(), to.mesh().str(),
         why_two(from.mesh(), to.mesh()));
  }
  if (from.sizes() != to.sizes() || from.dtype() != to.dtype()) {
    fail("redistribute", "the layouts are of different tensors; got {} and {}; expected equal sizes and dtypes",
         from.str(), to.str());
  }
}

PlanPtr cached_plan(const LayoutPtr& from, const LayoutPtr& to) {
  auto& cache = from->mesh().world().local<detail::PlanCache>();
  const std::pair<const Layout*, const Layout*> key{from.get(), to.get()};
  {
    std::lock_guard<std::mutex> lock(cache.mutex);
    if (auto it = cache.entries.find(key); it != cache.entries.end()) return it->second.plan;
  }
  check_same_tensor(*from, *to);
  auto plan = std::make_shared<const MovePlan>(redistribute::find_plan(from, to));
  decltype(cache.entries) forgotten;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(cache.mutex);
  if (cache.entries.size() >= detail::PlanCache::kCapacity) forgotten.swap(cache.entries);
  cache.entries.insert_or_assign(key, detail::PlanCache::Entry{from, to, plan});
  return plan;
}

bool communicates(const Step& step) {
  int64_t ranks = 1;
  for (int64_t i : step.mesh_dims) ranks *= step.before->mesh().sizes()[i];
  return ranks > 1;
}

comm::Async run(const at::Tensor& local, const Step& step) {
  const auto transition = redistribute::transition(step.from, step.to);
  if (!communicates(step)) {
    return step.from.is_flat() || step.to.is_flat() ? redistribute::flat_of_one(local, step) : comm::Async{local, {}};
  }
  switch (transition) {
    case Transition::all_gather: return redistribute::all_gather(local, step);
    case Transition::reduce_scatter: return redistribute::reduce_scatter(local, step);
    case Transition::all_reduce: return redistribute::all_reduce(local, step);
    case Transition::all_to_all: return redistribute::all_to_all(local, step);
    case Transition::chunk: return redistribute::chunk(local, step);
    case Transition::to_partial: return redistribute::to_partial(local, step);
    case Transition::flat_all_gather: return redistribute::flat_all_gather(local, step);
    case Transition::flat_reduce_scatter: return redistribute::flat_reduce_scatter(local, step);
    case Transition::flat_chunk: return redistribute::flat_chunk(local, step);
    case Transition::none:
    case Transition::impossible: break;
  }
  return {local, {}};
}

}  // namespace

size_t detail::PlanCache::Hash::operator()(const std::pair<const Layout*, const Layout*>& key) const {
  return c10::get_hash(key.first, key.second);
}

MovePlan plan_move(const LayoutPtr& from, const LayoutPtr& to) {
  return from == to ? MovePlan{} : *cached_plan(from, to);
}

double move_seconds(const LayoutPtr& from, const LayoutPtr& to) {
  return from == to ? 0 : cached_plan(from, to)->seconds;
}

comm::Async move_local(const at::Tensor& local, const LayoutPtr& from, const LayoutPtr& to) {
  if (from == to) return {local, {}};
  const c10::impl::ExcludeDispatchKeyGuard below{c10::DispatchKeySet(kDTensorKey)};  // local tensors stay plain inside Spmd
  if (local.sizes() != from->local_sizes() || local.scalar_type() != from->dtype()) {
    fail("redistribute", "the local tensor does not fit its layout {}; got {} [{}]; expected [{}]", from->str(),
         c10::toString(local.scalar_type()), fmt::join(local.sizes(), ", "), fmt::join(from->local_sizes(), ", "));
  }
  const auto plan = cached_plan(from, to);
  comm::Async moved{local, {}};
  for (const auto& step : plan->steps) moved = run(std::move(moved).get(), step);
  return moved;
}

std::string Step::str() const {
  std::vector<std::string> names;
  for (int64_t i : mesh_dims) names.push_back(before->mesh().names()[i]);
  return fmt::format("{} -> {}: {} on {}", from.str(), to.str(),
                     communicates(*this) ? name(redistribute::transition(from, to)) : "nothing", fmt::join(names, "+"));
}

std::string MovePlan::str() const {
  if (steps.empty()) return "nothing";
  std::string text;
  for (const auto& step : steps) text += step.str() + "; ";
  return text + fmt::format("{:.1f} us", seconds * 1e6);
}

namespace redistribute {

const char* name(Transition transition) {
  switch (transition) {
    case Transition::none: return "none";
    case Transition::all_gather: return "all_gather";
    case Transition::reduce_scatter: return "reduce_scatter";
    case Transition::all_reduce: return "all_reduce";
    case Transition::all_to_all: return "all_to_all";
    case Transition::chunk: return "chunk";
    case Transition::to_partial: return "to_partial";
    case Transition::flat_all_gather: return "all_gather";
    case Transition::flat_reduce_scatter: return "reduce_scatter";
    case Transition::flat_chunk: return "chunk";
    case Transition::impossible: return "impossible";
  }
  return "?";
}

Transition transition(const Placement& from, const Placement& to) {
  if (from == to) return Transition::none;
  switch (from.kind) {
    case PlacementKind::replicate:
      return to.is_shard() ? Transition::chunk : to.is_flat() ? Transition::flat_chunk : Transition::to_partial;
    case PlacementKind::flat: return to.is_replicate() ? Transition::flat_all_gather : Transition::impossible;
    case PlacementKind::shard:
      if (to.is_partial() || to.is_flat()) return Transition::impossible;
      return to.is_replicate() ? Transition::all_gather : Transition::all_to_all;
    case PlacementKind::partial:
      if (to.is_partial()) return Transition::impossible;
      if (to.is_flat()) return Transition::flat_reduce_scatter;
      return to.is_replicate() ? Transition::all_reduce : Transition::reduce_scatter;
  }
  return Transition::impossible;
}

}  // namespace redistribute
at::Tensor own_shard(const at::Tensor& whole, const Layout& layout) {
  const Placements replicated(layout.mesh().ndim(), replicate());
  const auto get = [&](PlacementsRef placements) {
    return Layout::get(layout.mesh(), placements, whole.sizes(), whole.strides(), whole.scalar_type());
  };
  return move_local(whole, get(replicated), get(layout.placements())).get();
}

}  // namespace dtensor
