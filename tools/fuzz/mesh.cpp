// A program on a mesh: one rank's run.
#include "check.hpp"

#include "src/dispatch/cache.hpp"

#include <dtensor/dtensor.hpp>

#include <range/v3/numeric/iota.hpp>

#include <algorithm>
#include <cmath>
#include <optional>

namespace dtensor::fuzz {

namespace {

// What the rank at `index` of `count` along a Partial mesh dimension holds of `whole`: unequal parts, which whole numbers keep whole.
// Of infinite data an extreme's other parts are those of no elements.
at::Tensor part(const at::Tensor& whole, ReduceOp op, int64_t index, int64_t count, int64_t seed, bool infinite) {
  if (count == 1) return whole;
  const bool last = index == count - 1;
  const auto others = static_cast<double>((count - 1) * (count - 2) / 2 + (count - 1) * seed);
  const auto mine = static_cast<double>(index + seed);
  switch (op) {
    case ReduceOp::avg: return last ? whole * count - others : at::zeros_like(whole) + mine;
    case ReduceOp::sum: return last ? whole - others : at::zeros_like(whole) + mine;
    case ReduceOp::max:
    case ReduceOp::min: {  // each element's extreme is with one rank
      const auto turn = at::arange(whole.numel(), at::kLong).add(seed).remainder(count).eq(index).view(whole.sizes());
      if (infinite && whole.is_floating_point()) return whole.masked_fill(turn.logical_not(), op == ReduceOp::max ? -INFINITY : INFINITY);
      return at::where(turn, whole, op == ReduceOp::max ? whole - mine - 1 : whole + mine + 1);
    }
    case ReduceOp::product: return last ? whole * std::pow(0.5, count - 1) : at::full_like(whole, 2);
    default: return whole;
  }
}

// The leaf's tensor as this rank's shard of a distributed one.
at::Tensor placed(const Leaf& leaf, const DeviceMesh& mesh) {
  auto data = data_of(leaf);
  auto cut = leaf.placements;
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if (!cut[m].is_partial()) continue;
    data = part(data, cut[m].op, mesh.coordinate(m), mesh.size(m), 1 + leaf.seed % 3, leaf.data == Data::infinite).to(leaf.dtype);
    cut[m] = replicate();
  }
  set_replication_check(false);  // parts differ between ranks
  auto value = distribute_tensor(data, mesh, cut).tensor();
  set_replication_check(true);
  if (!(cut == leaf.placements)) {
    value = from_local(DTensor(value).to_local().clone(), mesh, leaf.placements, leaf.sizes).tensor();
  }
  return value.requires_grad_(leaf.requires_grad);
}

at::Tensor redistributed(const at::Tensor& from, const Placements& placements) {
  auto moved = redistribute(from, placements);
  return moved.unsafeGetTensorImpl() == from.unsafeGetTensorImpl() ? from.clone() : moved;
}

// The refusals that the library documents: said before anything is changed, with a hint. Outside of Spmd, what libtorch makes inside
// an operator or its gradient may be a plain tensor: the only one that a backward may end with.
bool meets_plain(const std::string& text, bool spmd) {
  return !spmd && text.find("a plain tensor meets distributed ones") != std::string::npos;
}

bool is_refusal(const std::string& text, bool spmd) {
  return meets_plain(text, spmd) || text.find("P(norm2) cannot hold numbers below 0; hint:") != std::string::npos;
}

// What a rank remembers of calls hangs on what else it did, on other meshes too; it must not matter. So now and then one forgets.
void forget_sometimes(int rank, size_t step) {
  if ((static_cast<size_t>(rank) * 7 + step * 5) % 11 < 3) dispatch::DecisionCache::of_this_thread().clear();
}

std::string name_of(const Step& step) {
  return step.kind == Step::Kind::call ? step.op->name : step.kind == Step::Kind::leaf ? "leaf" : "redistribute";
}

}  // namespace

Outcome run_on_mesh(const Program& program, bool& broke) {
  std::vector<int> ranks(c10::multiply_integers(program.mesh));
  std::vector<std::string> names;
  ranges::iota(ranks, 0);
  for (size_t m = 0; m < program.mesh.size(); ++m) names.push_back("dim" + std::to_string(m));
  const DeviceMesh mesh(at::kCPU, ranks, program.mesh, names);
  std::optional<Spmd> region;
  if (program.spmd) region.emplace(mesh);

  Outcome outcome;
  std::map<int, at::Tensor> values;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const auto& step = program.steps[i];
    forget_sometimes(mesh.world().rank(), i);
    Tensors in;
    for (const int value : step.in) {
      if (values.count(value)) in.push_back(values.at(value));
    }
    if (in.size() != step.in.size()) continue;  // what a refused operator would have given
    try {
      Tensors out;
      if (step.kind == Step::Kind::leaf) out = {placed(step.leaf, mesh)};
      if (step.kind == Step::Kind::redistribute) out = {redistributed(in[0], step.placements)};
      if (step.kind == Step::Kind::call) out = run_op(step, in);
      for (size_t r = 0; r < step.out.size(); ++r) values[step.out[r]] = out.at(r);
      if (step.kind == Step::Kind::call && step.op->in_place) see_writes(values);
    } catch (const std::exception& error) {
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      const std::string text = known ? known->what_without_backtrace() : error.what();
      if (step.kind == Step::Kind::call && is_refusal(text, program.spmd)) {
        outcome.refused[static_cast<int>(i)] = text;
        continue;
      }
      outcome.error = name_of(step) + " threw: " + text;
      broke = true;
      return outcome;
    }
  }
  forget_sometimes(mesh.world().rank(), program.steps.size());
  try {
    run_backward(
        program, values, [&](const Leaf& leaf) { return placed(leaf, mesh); }, outcome);
    outcome.backward_refused = !outcome.backward_error.empty() && meets_plain(outcome.backward_error, program.spmd);
    for (const auto& [number, value] : values) outcome.values[number] = seen(value);
  } catch (const c10::Error& error) {
    outcome.error = std::string("reading the values threw: ") + error.what_without_backtrace();
    broke = true;
  }
  return outcome;
}

}  // namespace dtensor::fuzz
