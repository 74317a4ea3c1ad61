// For each mesh dimension, picks the cheapest of the combinations that a rule allows, by the planner's cost model.
#include "src/dispatch/decide.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/alias.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include "src/mesh/cut_check.hpp"
#include "src/redistribute/transition.hpp"

#include <range/v3/numeric/iota.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

namespace dtensor::dispatch {

namespace {

using rules::Call;
using rules::Candidate;
using rules::Candidates;

// What candidates are compared by, best first: time, then fewer moves, then less memory, then order in the rule.
using Price = std::tuple<double, int, int64_t>;
constexpr double kForever = std::numeric_limits<double>::infinity();

LayoutPtr with_one(const LayoutPtr& layout, int64_t mesh_dim, const Placement& placement) {
  if (layout->placements()[mesh_dim] == placement) return layout;
  Placements placements(layout->placements().begin(), layout->placements().end());
  placements[mesh_dim] = placement;
  return layout->with(placements);
}

LayoutPtr with_all(const LayoutPtr& layout, const Placements& placements) {
  return layout->placements() == PlacementsRef(placements) ? layout : layout->with(placements);
}

int64_t elements(c10::IntArrayRef sizes) {
  int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return count;
}

// The time to reduce replicated, expanded operands under a candidate; 0 for all other calls. Such a tensor is constant along a dim, as the
// gradient of a sum is: to reduce it whole on every rank would be work that grows with the mesh, and its part is free.
double expanded_seconds(const Call& call, const Candidate& candidate, int64_t mesh_dim, const std::vector<LayoutPtr>& now) {
  double bytes = 0;
  for (const auto& layout : now) {
    if (!layout->placements()[mesh_dim].is_replicate() || !dtensor::detail::is_expanded(*layout)) return 0;
    bytes += static_cast<double>(elements(layout->sizes()) * static_cast<int64_t>(c10::elementSize(layout->dtype())));
  }
  const bool reduces = std::ranges::all_of(candidate.out, [](const auto& p) { return p.is_partial(); });
  return redistribute::copy_seconds(call.mesh, mesh_dim, reduces ? bytes / static_cast<double>(call.mesh.size(mesh_dim)) : bytes);
}

bool is_written(const OpInfo& info, const rules::Operand& operand) {
  return std::ranges::find(info.written, operand.argument) != info.written.end();
}

// How a written operand lies when the operator has run.
const Placement& placement_written(const Call& call, const OpInfo& info, const Candidate& candidate, size_t operand) {
  for (size_t r = 0; r < info.returns_argument.size() && r < candidate.out.size(); ++r) {
    if (info.returns_argument[r] == call.operands[operand].argument && call.operands[operand].element < 0) return candidate.out[r];
  }
  return candidate.in[operand];
}

// Whether a whole operand that is written may stay cut as a candidate leaves it.
bool stays_cut(const rules::Operand& operand, const Placement& now, const Placement& in, const Placement& written) {
  return operand.yields && now.is_replicate() && in.is_shard() && in == written;
}

// The time that the sums will take that a candidate leaves pending where it moves operands: these could have been moved so that there are
// none. `out`: the outputs' placements on the mesh dimensions before.
double pending_seconds(const Call& call, const Candidate& candidate, int64_t mesh_dim, const std::vector<Placements>& out) {
  double seconds = 0;
  for (size_t i = 0; i < candidate.out.size() && i < call.outputs.size(); ++i) {
    if (!candidate.out[i].is_partial() || !call.outputs[i].defined) continue;
    int64_t count = elements(call.outputs[i].sizes);
    for (size_t m = 0; m < out[i].size(); ++m) count /= out[i][m].cuts() ? call.mesh.size(static_cast<int64_t>(m)) : 1;
    const auto bytes = count * static_cast<int64_t>(c10::elementSize(call.outputs[i].dtype));
    seconds += redistribute::pending_seconds(call.mesh, mesh_dim, bytes);
  }
  return seconds;
}

// `enough`: a time that is of no interest any more.
Price price_of(const Call& call, const OpInfo& info, const Candidate& candidate, int64_t mesh_dim, const std::vector<LayoutPtr>& now,
               const std::vector<Placements>& out, double enough) {
  double seconds = expanded_seconds(call, candidate, mesh_dim, now);
  if (candidate.lowering_bytes > 0) seconds += redistribute::all_reduce_seconds(call.mesh, mesh_dim, candidate.lowering_bytes);
  const double without_moves = seconds;
  int moves = 0;
  int64_t memory = 0;
  for (size_t i = 0; i < now.size() && seconds <= enough; ++i) {
    const auto next = with_one(now[i], mesh_dim, candidate.in[i]);
    if (is_written(info, call.operands[i])) {
      const auto& placement = placement_written(call, info, candidate, i);
      const auto written = with_one(now[i], mesh_dim, placement);
      const bool stays = written == now[i] || stays_cut(call.operands[i], now[i]->placements()[mesh_dim], candidate.in[i], placement);
      if (!stays) seconds += move_seconds(written, now[i]), ++moves;
    }
    if (next == now[i]) continue;
    seconds += move_seconds(now[i], next);
    ++moves;
  }
  if (seconds > without_moves && seconds <= enough) seconds += pending_seconds(call, candidate, mesh_dim, out);
  const auto parts = call.mesh.size(mesh_dim);
  for (size_t i = 0; i < candidate.out.size() && i < call.outputs.size(); ++i) {
    memory += elements(call.outputs[i].sizes) / (candidate.out[i].cuts() ? parts : 1);
  }
  return {seconds, moves, memory};
}

// Whether the operands can be cut so: the splits of later mesh dimensions must still divide what this one leaves them.
bool fits(const Call& call, const Candidate& candidate, int64_t mesh_dim) {
  for (size_t i = 0; i < candidate.in.size(); ++i) {
    auto placements = call.chosen[i];
    placements[mesh_dim] = candidate.in[i];
    const auto misfit = detail::normalize(call.mesh.sizes(), placements, call.operands[i].sizes());
    if (misfit.kind != detail::Misfit::none) return false;
  }
  return true;
}

PlacementOption option_of(const Candidate& candidate, const Price& price, const char* dropped) {
  const auto& [seconds, moves, memory] = price;
  return {candidate.in, candidate.out, seconds, moves, memory, candidate.lowering_bytes, false, dropped ? dropped : ""};
}

size_t output_count(const Call& call, const OpInfo& info) {
  return call.outputs.empty() ? info.schema->returns().size() : call.outputs.size();
}

// A flat operand stays so or becomes whole: one all_gather, for which a unit of parameters may have the value at hand. While it is flat,
// nothing is moved below the flat cut: that would deal out all elements anew. An operand becomes flat
// only beside one that is.
bool cuts_flat(const Candidate& candidate, int64_t mesh_dim, const std::vector<LayoutPtr>& now) {
  const auto is_flat = [](const Placement& placement) { return placement.is_flat(); };
  const bool beside = std::ranges::any_of(now, [&](const LayoutPtr& layout) { return is_flat(layout->placements()[mesh_dim]); });
  if (!beside && std::ranges::any_of(candidate.in, is_flat)) return true;
  for (size_t i = 0; i < now.size(); ++i) {
    if (!now[i]->is_flat()) continue;
    const auto& next = candidate.in[i];
    const auto& placement = now[i]->placements()[mesh_dim];
    if (placement.is_flat() ? !next.is_flat() && !next.is_replicate() : next != placement) return true;
  }
  return false;
}

bool moves_pinned(const Call& call, const Candidate& candidate, int64_t mesh_dim, const std::vector<LayoutPtr>& now) {
  for (size_t i = 0; i < now.size(); ++i) {
    const auto& p = now[i]->placements()[mesh_dim];
    if (call.operands[i].pinned && p.is_shard() && candidate.in[i] != p) return true;
  }
  return false;
}

// Whether a candidate leaves all operands as they are.
bool moves_nothing(const Candidate& candidate, int64_t mesh_dim, const std::vector<LayoutPtr>& now) {
  for (size_t i = 0; i < now.size(); ++i) {
    if (now[i]->placements()[mesh_dim] != candidate.in[i]) return false;
  }
  return true;
}

// The cheapest candidate on a mesh dimension, null when none is possible. Those that move nothing are tried first: when one of them
// costs nothing, plans for the others, which take most of the time, need not be made.
const Candidate* cheapest(const Call& call, const OpInfo& info, const Candidates& candidates, int64_t mesh_dim,
                          const std::vector<LayoutPtr>& now, const std::vector<Placements>& out, Trace* trace) {
  const Candidate* best = nullptr;
  Price lowest;
  auto* options = trace ? &(*trace)[mesh_dim] : nullptr;
  if (options) options->assign(candidates.size(), {});
  const bool pinned = std::ranges::any_of(call.operands, [](const auto& operand) { return operand.pinned; });
  const bool may_stay = pinned && std::ranges::any_of(candidates, [&](const Candidate& candidate) {
    return !moves_pinned(call, candidate, mesh_dim, now) && fits(call, candidate, mesh_dim) && !cuts_flat(candidate, mesh_dim, now);
  });
  for (const bool moving : {false, true}) {
    if (moving && best && std::get<0>(lowest) == 0 && !trace) break;
    for (const auto& candidate : candidates) {
      if (moves_nothing(candidate, mesh_dim, now) == moving) continue;
      const char* dropped = !fits(call, candidate, mesh_dim)                                ? "does not fit the sizes"
                            : cuts_flat(candidate, mesh_dim, now)                           ? "would cut a flat operand anew"
                            : may_stay && moves_pinned(call, candidate, mesh_dim, now) ? "would move a pinned operand"
                                                                                            : nullptr;
      const auto price =
          dropped ? Price() : price_of(call, info, candidate, mesh_dim, now, out, best && !trace ? std::get<0>(lowest) : kForever);
      if (options) (*options)[&candidate - candidates.data()] = option_of(candidate, price, dropped);
      if (!dropped && (!best || price < lowest)) best = &candidate, lowest = price;
    }
  }
  if (options && best) (*options)[best - candidates.data()].chosen = true;
  return best;
}

bool is_finite(const c10::IValue& value) {
  if (value.isDouble()) return std::isfinite(value.toDouble());
  if (value.isComplexDouble()) return std::isfinite(value.toComplexDouble().real()) && std::isfinite(value.toComplexDouble().imag());
  if (!value.isList() || value.isTensorList()) return true;
  const auto elements = value.toListRef();
  return std::ranges::all_of(elements, is_finite);
}

bool pends_as_sum(const Placement& placement) {
  return placement.is_partial() && !placement.is_partial(ReduceOp::max) && !placement.is_partial(ReduceOp::min);
}

// The combinations on a mesh dimension. What scales parts of a sum by an infinite number would make NaN of those that are zero, and of two
// that have other signs; keys tell such numbers from others.
Candidates candidates_for(const Call& call, const rules::Rule* rule, int64_t mesh_dim, size_t outputs) {
  Candidates candidates = rule ? rule->candidates(call, mesh_dim) : Candidates();
  if (!std::ranges::all_of(call.arguments, is_finite)) {
    std::erase_if(candidates, [](const Candidate& candidate) {
      const auto& results = candidate.out.empty() ? candidate.in : candidate.out;
      return std::ranges::any_of(results, pends_as_sum);
    });
  }
  candidates.push_back({Placements(call.operands.size(), replicate()), Placements(outputs, replicate())});
  return candidates;
}

// The order in which mesh dimensions are decided on: a flat cut is of what the others leave, so it comes last.
std::vector<int64_t> order_of(const std::vector<LayoutPtr>& now, int64_t mesh_dims) {
  std::vector<int64_t> order(mesh_dims);
  ranges::iota(order, 0);
  std::ranges::stable_partition(order, [&](int64_t m) {
    return std::ranges::none_of(now, [&](const LayoutPtr& layout) { return layout->placements()[m].is_flat(); });
  });
  return order;
}

// Null when an operand that is flat can neither stay so nor become whole without others' placements being moved.
std::optional<rules::Resolution> resolve_from(std::vector<LayoutPtr> now, Call& call, const OpInfo& info, const rules::Rule* rule,
                                              Trace* trace) {
  rules::Resolution resolution;
  resolution.out.resize(output_count(call, info), Placements(call.mesh.ndim(), replicate()));
  auto written = call.chosen;
  if (trace) trace->assign(call.mesh.ndim(), {});
  for (const auto m : order_of(now, call.mesh.ndim())) {
    const auto candidates = candidates_for(call, rule, m, resolution.out.size());
    const auto* best = cheapest(call, info, candidates, m, now, resolution.out, trace);
    if (!best) return std::nullopt;
    for (size_t i = 0; i < now.size(); ++i) {
      written[i][m] = is_written(info, call.operands[i]) ? placement_written(call, info, *best, i) : best->in[i];
      now[i] = with_one(now[i], m, best->in[i]);
      call.chosen[i][m] = best->in[i];
    }
    for (size_t r = 0; r < resolution.out.size() && r < best->out.size(); ++r) resolution.out[r][m] = best->out[r];
  }
  // A cut of half the choice may have a simpler name that does not stand for it in the whole: so layouts are made of all placements at
  // once.
  for (size_t i = 0; i < now.size(); ++i) {
    resolution.in.push_back(with_all(call.operands[i].layout, call.chosen[i]));
    resolution.written.push_back(with_all(call.operands[i].layout, written[i]));
  }
  return resolution;
}

}  // namespace

rules::Resolution resolve(Call& call, const OpInfo& info, const rules::Rule* rule, Trace* trace) {
  std::vector<LayoutPtr> now;
  for (const auto& operand : call.operands) now.push_back(operand.layout);
  const auto chosen = call.chosen;
  if (auto resolution = resolve_from(now, call, info, rule, trace)) return std::move(*resolution);
  call.chosen = chosen;
  for (size_t i = 0; i < now.size(); ++i) {
    if (!now[i]->is_flat()) continue;
    const auto m = now[i]->flat_dim();
    now[i] = with_one(now[i], m, replicate());
    call.chosen[i][m] = replicate();
  }
  auto resolution = resolve_from(now, call, info, rule, trace);
  require(
      resolution.has_value(), info.name,
      "no placements of its operands were found that are legal; got {}; expected that whole operands always are; this is a bug of dtensor; "
      "hint: redistribute() the operands to Replicate first",
      describe(call));
  return std::move(*resolution);
}

}  // namespace dtensor::dispatch
