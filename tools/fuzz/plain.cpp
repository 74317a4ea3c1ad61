#include "plain.hpp"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>

namespace dtensor::fuzz {

namespace {

// Larger values, or whole numbers of which a sum might not be exact, end a program's growth.
double most(at::ScalarType dtype, Quality quality) {
  if (quality == Quality::exact) return dtype == at::kFloat ? 1e5 : 1e7;
  return quality == Quality::fine ? 1e4 : 1e2;
}

bool bounded(T value, double most, bool infinities) {
  if (value.numel() == 0 || value.scalar_type() == at::kBool) return true;
  const auto size = value.detach().to(at::kDouble).abs();
  return (infinities ? size.masked_fill(size.isinf(), 0) : size).max().item<double>() <= most;  // false for NaN
}

// Whether some of the elements share memory, as after expand and unfold: what a write does to them is nobody's promise.
bool overlaps(T value) {
  int64_t extent = 1;
  for (int64_t d = 0; d < value.dim(); ++d) extent += (value.size(d) - 1) * value.stride(d);
  return value.numel() > extent;
}

// Where its elements lie in their storage.
std::set<int64_t> places(T value) {
  auto at = at::zeros(value.sizes(), at::kLong).add(value.storage_offset());
  for (int64_t d = 0; d < value.dim(); ++d) {
    Ints along(value.dim(), 1);
    along[d] = value.size(d);
    at = at.add(at::arange(value.size(d), at::kLong).mul(value.stride(d)).view(along));
  }
  const auto flat = at.flatten();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

// Whether some elements of what is read are written, at another position: what is read then is nobody's promise either. An operator that
// goes by indices writes at other positions than it reads.
bool reads_what_it_writes(T written, T read, bool by_index) {
  const bool same = !by_index && written.sizes() == read.sizes() && written.strides() == read.strides() &&
                    written.storage_offset() == read.storage_offset();
  if (!read.is_alias_of(written) || same) return false;
  const auto a = places(written), b = places(read);
  return std::ranges::any_of(b, [&](int64_t place) { return a.count(place) != 0; });
}

const void* memory(T value) { return value.storage().unsafeGetStorageImpl(); }

// What the numbers 0, 1, ... of a leaf's elements become.
at::Tensor values(const Leaf& leaf) {
  const auto count = c10::multiply_integers(leaf.sizes);
  const auto i = at::arange(count, at::kLong);
  switch (leaf.data) {
    case Data::whole: return i.mul(7 + 2 * (leaf.seed % 4)).add(leaf.seed).remainder(17).sub(8);
    case Data::distinct: {
      int64_t step = 1 + leaf.seed % std::max<int64_t>(count, 1);
      while (std::gcd(step, std::max<int64_t>(count, 1)) != 1) ++step;
      return i.mul(step).add(leaf.seed).remainder(std::max<int64_t>(count, 1)).sub(count / 2);
    }
    case Data::fraction: return i.to(at::kDouble).mul(0.7391).add(static_cast<double>(leaf.seed)).sin().mul(2);
    case Data::infinite: {
      const auto numbers = i.mul(7).add(leaf.seed).remainder(17).sub(8).to(at::kDouble);
      const auto turn = i.mul(3 + 2 * (leaf.seed % 3)).add(leaf.seed).remainder(7);  // rows, and all of a small tensor, too
      return numbers.masked_fill(turn.lt(2), -INFINITY).masked_fill(turn.eq(2 + leaf.seed % 8), INFINITY);
    }
    case Data::mask: return i.mul(5).add(leaf.seed).remainder(7).lt(3);
    case Data::index: return i.mul(5 + 2 * (leaf.seed % 4)).add(leaf.seed).remainder(leaf.bound);
    case Data::cyclic: {
      auto sum = at::zeros(leaf.sizes, at::kLong).add(leaf.seed);
      for (int64_t d = 0; d < static_cast<int64_t>(leaf.sizes.size()); ++d) {
        Ints along(leaf.sizes.size(), 1);
        along[d] = leaf.sizes[d];
        sum = sum.add(at::arange(leaf.sizes[d], at::kLong).mul(d == leaf.dim ? 1 : 3).view(along));
      }
      return sum.remainder(leaf.bound).flatten();
    }
  }
  return i;
}

}  // namespace

at::Tensor data_of(const Leaf& leaf) {
  const auto data = values(leaf).to(leaf.dtype).view(leaf.sizes);
  const bool partial = std::ranges::any_of(leaf.placements, [](const auto& p) { return p.is_partial(); });
  if (!leaf.reversed || partial) return data.clone();  // a leaf is nobody's view; from_local makes what is row-major
  Ints dims(leaf.sizes.size());
  std::iota(dims.rbegin(), dims.rend(), 0);
  return data.permute(dims).clone(at::MemoryFormat::Contiguous).permute(dims).clone();
}

Tensors run_op(const Step& step, const Tensors& in) {
  std::optional<c10::NoGradGuard> guard;
  if (step.no_grad) guard.emplace();
  return step.op->run(in, step.args);
}

Quality PlainRun::quality(T value) const {
  const auto found = quality_.find(memory(value));
  return found == quality_.end() ? Quality::exact : found->second;
}

bool PlainRun::keep(T value, Quality quality, bool fresh) {
  if (!value.is_floating_point()) quality = Quality::exact;
  if (value.scalar_type() == at::kFloat && quality == Quality::fine) quality = Quality::coarse;
  auto& kept = quality_[memory(value)];
  kept = fresh ? quality : std::min(kept, quality);
  return bounded(value, most(value.scalar_type(), kept), infinities_);
}

bool PlainRun::run(const Step& step) {
  for (const int value : step.in) {
    if (!has(value)) return false;
  }
  switch (step.kind) {
    case Step::Kind::leaf: {
      auto value = data_of(step.leaf).requires_grad_(step.leaf.requires_grad);
      keep(value, step.leaf.data == Data::fraction ? Quality::fine : Quality::exact, true);
      values_[step.out[0]] = std::move(value);
      return true;
    }
    case Step::Kind::redistribute: {
      const auto& from = value(step.in[0]);
      auto moved = from.clone();
      keep(moved, quality(from), true);
      values_[step.out[0]] = std::move(moved);
      return true;
    }
    case Step::Kind::call: return run_call(step);
  }
  return false;
}

void see_writes(const std::map<int, at::Tensor>& values) {
  for (const auto& [number, value] : values) value.grad_fn();
}

bool PlainRun::run_call(const Step& step) {
  Tensors in;
  std::vector<bool> exact;
  auto worst = Quality::exact;
  for (const int i : step.in) {
    in.push_back(value(i));
    worst = std::min(worst, quality(in.back()));
    exact.push_back(quality(in.back()) == Quality::exact);
  }
  results.clear();
  const auto& op = *step.op;
  if (op.tame && !op.tame(in, exact, step.args)) return false;
  if (op.in_place && overlaps(in[0])) return false;
  const auto unsafe = [&](T read) { return reads_what_it_writes(in[0], read, op.by_index); };
  if (op.in_place && std::any_of(in.begin() + 1, in.end(), unsafe)) return false;
  Tensors out;
  try {
    out = run_op(step, in);
  } catch (const c10::Error&) {
    return false;
  }
  if (op.in_place) out.assign(1, in[0]);
  if (!op.in_place && out.size() != step.out.size() && !step.out.empty()) return false;
  for (const auto& result : out) {
    if (!result.is_floating_point() && worst != Quality::exact && !op.tame) return false;
    if (result.is_complex() || result.dim() > 7 || result.numel() > 5000) return false;
    const bool view = std::ranges::any_of(in, [&](T operand) { return result.is_alias_of(operand); });
    if (!keep(result, op.effect == Effect::keeps ? worst : std::min(worst, Quality::fine), !view)) return false;
  }
  if (op.in_place) {
    try {
      see_writes(values_);
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (step.out.empty()) results.push_back(out[i]);
    else values_[step.out[i]] = out[i];
  }
  return true;
}

std::vector<int> PlainRun::number_results(int first) {
  std::vector<int> numbers;
  for (auto& result : results) {
    values_[first] = std::move(result);
    numbers.push_back(first++);
  }
  results.clear();
  return numbers;
}

void run_backward(const Program& program, const std::map<int, at::Tensor>& values,
                  const std::function<at::Tensor(const Leaf&)>& place, Outcome& outcome) {
  Tensors roots, cotangents, leaves, some;
  for (const auto& root : program.roots) {
    const auto found = values.find(root.value);
    if (found == values.end() || !found->second.requires_grad()) continue;
    roots.push_back(found->second);
    cotangents.push_back(place(root.cotangent));
  }
  for (const auto& step : program.steps) {
    if (step.kind == Step::Kind::leaf && step.leaf.requires_grad) leaves.push_back(values.at(step.out[0]));
  }
  if (roots.empty() || leaves.empty()) return;
  for (size_t i = 0; i < leaves.size(); i += 2) some.push_back(leaves[i]);
  try {
    const auto gradients = torch::autograd::grad(roots, some, cotangents, /*retain_graph=*/true, false, /*allow_unused=*/true);
    at::Tensor sum;
    for (const auto& root : roots) sum = sum.defined() ? sum + root.sum() : root.sum();
    sum.backward();
    for (const auto& gradient : gradients) outcome.gradients.push_back(seen(gradient));
    for (const auto& leaf : leaves) outcome.gradients.push_back(seen(leaf.grad()));
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    outcome.backward_error = known ? known->what_without_backtrace() : error.what();
  }
}

std::optional<Outcome> run_plain(const Program& program, const std::map<int, std::string>& refused) {
  PlainRun run(program.infinities);
  Outcome outcome;
  outcome.refused = refused;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const auto& step = program.steps[i];
    const bool ready = std::ranges::all_of(step.in, [&](int value) { return run.has(value); });
    if (!ready && refused.empty()) return std::nullopt;
    if (!ready || refused.count(static_cast<int>(i))) continue;
    if (!run.run(step)) return std::nullopt;
  }
  run_backward(program, run.values(), data_of, outcome);
  for (const auto& gradient : outcome.gradients) {
    if (!gradient.whole.defined()) continue;
    const auto numbers = program.infinities ? gradient.whole.nan_to_num(0, INFINITY, -INFINITY) : gradient.whole;
    if (!bounded(numbers, 1e8, program.infinities)) return std::nullopt;
  }
  for (const auto& [number, value] : run.values()) {
    outcome.values[number] = seen(value);
    outcome.quality[number] = run.quality(value);
    if (!bounded(value, 1e8, program.infinities)) return std::nullopt;  // written through another view
    const bool coarse = value.scalar_type() == at::kFloat;  // a gradient may be a product with any value
    outcome.gradient_quality = std::min(outcome.gradient_quality, coarse ? Quality::coarse : Quality::fine);
  }
  return outcome;
}

}  // namespace dtensor::fuzz
