// What is legal, found by running the raw operator on the parts: no rule is asked.
#include "tools/opcheck/check.hpp"

#include <range/v3/view/zip.hpp>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <set>

namespace dtensor::opcheck {

namespace {

using Names = std::set<std::string>;

// Replaces the i-th tensor of the arguments (in the order of tensors_in).
Stack with_tensors(const Stack& arguments, const std::vector<at::Tensor>& tensors) {
  Stack result;
  size_t next = 0;
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      result.push_back(value.toTensor().defined() ? c10::IValue(tensors[next++]) : value);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& element : value.toListRef()) list.push_back(element.toTensor().defined() ? tensors[next++] : at::Tensor());
      result.push_back(list);
    } else if (value.isList() && !value.toListRef().empty() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
      c10::List<c10::optional<at::Tensor>> list;
      for (const auto& element : value.toListRef()) {
        list.push_back(element.isTensor() ? c10::optional<at::Tensor>(tensors[next++]) : c10::optional<at::Tensor>());
      }
      result.push_back(list);
    } else {
      result.push_back(value);
    }
  }
  return result;
}

at::Tensor combined(const std::vector<at::Tensor>& parts, ReduceOp op) {
  auto result = parts[0];
  for (size_t r = 1; r < parts.size(); ++r) {
    if (parts[r].sizes() != result.sizes()) return {};
    result = op == ReduceOp::max   ? torch::maximum(result, parts[r])
             : op == ReduceOp::min ? torch::minimum(result, parts[r])
                                   : result + parts[r];
  }
  return op == ReduceOp::avg ? result / static_cast<int64_t>(parts.size()) : result;
}

// The names of the placements under which these parts are the tensor.
Names placements_of(const std::vector<at::Tensor>& parts, const at::Tensor& expected) {
  Names names;
  const auto n = static_cast<int64_t>(parts.size());
  if (std::ranges::all_of(parts, [&](const auto& part) { return close(part, expected); })) names.insert("R");
  const auto ndim = expected.dim();
  if (std::ranges::any_of(parts,
                  [&](const auto& part) { return part.dim() != ndim || part.scalar_type() != expected.scalar_type(); })) {
    return names;
  }
  for (int64_t d = 0; d < ndim; ++d) {
    for (const int64_t split : {1, 2}) {
      const auto placement = strided_shard(d, split);
      if (expected.size(d) % split != 0) continue;
      const auto cut = parts_of(expected, {placement}, {n});
      bool same = true;
      for (int64_t r = 0; same && r < n; ++r) same = close(parts[r], cut[r]);
      if (same) names.insert(placement.str());
    }
  }
  if (expected.scalar_type() == at::kBool || expected.is_complex()) return names;
  for (const auto op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::max, ReduceOp::min}) {
    if (op == ReduceOp::avg && !expected.is_floating_point()) continue;
    const auto whole = combined(parts, op);
    if (whole.defined() && close(whole, expected)) names.insert(partial(op).str());
  }
  return names;
}

// Results and written arguments, in this order.
std::vector<at::Tensor> effects(const Operator& op, const Stack& results, const Stack& arguments) {
  auto tensors = tensors_in(results);
  for (const auto i : written_arguments(op.schema())) {
    for (const auto& tensor : tensors_in({arguments[i]})) tensors.push_back(tensor);
  }
  return tensors;
}

// Per result its possible placements on `ranks` ranks; empty when the raw operator refuses.
std::vector<Names> on_ranks(const Operator& op, const Sample& sample, const Case& placements, int64_t ranks) {
  const auto tensors = tensors_in(sample.arguments);
  std::vector<std::vector<at::Tensor>> by_operand;
  for (const auto& [tensor, its] : ranges::views::zip(tensors, placements)) by_operand.push_back(parts_of(tensor, its, {ranks}));
  std::vector<std::vector<at::Tensor>> by_result;
  for (int64_t r = 0; r < ranks; ++r) {
    std::vector<at::Tensor> locals, originals;
    for (const auto& parts : by_operand) originals.push_back(parts[r]), locals.push_back(parts[r].clone());
    const auto arguments = with_tensors(sample.arguments, locals);
    auto stack = arguments;
    op.handle.callBoxed(&stack);
    if (resized(op.schema(), arguments, with_tensors(sample.arguments, originals))) return {};
    const auto found = effects(op, stack, arguments);
    by_result.resize(found.size());
    for (auto&& [parts, part] : ranges::views::zip(by_result, found)) parts.push_back(part);
  }
  const auto expected = effects(op, sample.results, sample.after);
  std::vector<Names> names;
  for (const auto& [parts, whole] : ranges::views::zip(by_result, expected)) names.push_back(placements_of(parts, whole));
  return names;
}

// A written operand must lie afterwards as it did before.
bool keeps_written(const Operator& op, const Sample& sample, const Case& placements, const std::vector<Names>& names) {
  std::map<int, std::vector<size_t>> operands;  // of each argument
  size_t next = 0;
  for (size_t i = 0; i < sample.arguments.size(); ++i) {
    for (size_t k = 0; k < tensors_in({sample.arguments[i]}).size(); ++k) operands[static_cast<int>(i)].push_back(next++);
  }
  size_t result = tensors_in(sample.results).size();
  for (const auto i : written_arguments(op.schema())) {
    for (const auto operand : operands[i]) {
      if (result >= names.size() || !names[result++].count(placements[operand][0].str())) return false;
    }
  }
  return true;
}

}  // namespace

std::string legal_results(const Operator& op, const Sample& sample, const Case& placements, c10::ArrayRef<int64_t> ranks) {
  c10::NoGradGuard no_grad;
  torch::manual_seed(5);
  std::vector<Names> common;
  for (const auto n : ranks) {
    std::vector<Names> names;
    try {
      names = on_ranks(op, sample, placements, n);
    } catch (const std::exception&) {
      return "";
    }
    if (common.empty()) common = names;
    if (names.empty() || names.size() != common.size()) return "";
    for (size_t k = 0; k < names.size(); ++k) {
      Names both;
      for (const auto& name : common[k]) {
        if (names[k].count(name)) both.insert(name);
      }
      if (both.empty()) return "";
      common[k] = both;
    }
  }
  if (common.empty() || !keeps_written(op, sample, placements, common)) return "";
  std::string text;
  for (const auto& names : common) text += (text.empty() ? "" : ", ") + (names.count("R") ? "R" : *names.rbegin());
  return text;
}

}  // namespace dtensor::opcheck
