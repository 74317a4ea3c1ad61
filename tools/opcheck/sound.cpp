// Whether a sample is a fair question: libtorch's own operator must have one answer to it, whatever lies around its operands.
#include "tools/opcheck/check.hpp"

#include "src/dispatch/op_info.hpp"

#include <torch/torch.h>

#include <algorithm>

namespace dtensor::opcheck {

namespace {

using Copy = std::function<at::Tensor(const at::Tensor&)>;

Stack copied(const Stack& values, const Copy& copy) {
  auto copies = deep_copy(values);
  for (auto& value : copies) {
    if (value.isTensor() && value.toTensor().defined()) value = copy(value.toTensor());
    if (!value.isTensorList()) continue;
    c10::List<at::Tensor> list;
    for (const auto& element : value.toListRef()) list.push_back(element.toTensor().defined() ? copy(element.toTensor()) : element.toTensor());
    value = list;
  }
  return copies;
}

at::Tensor in_row_major_order(const at::Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

// The tensor as a piece of a larger memory, which holds a number everywhere else.
Copy between(double number) {
  return [number](const at::Tensor& tensor) {
    const auto kept = stored(tensor);
    const auto dense = kept.clone();
    const int64_t around = 2 * dense.numel() + 64;
    const auto fill = c10::isIntegralType(dense.scalar_type(), true) ? std::round(number) : number;
    auto piece = at::full({dense.numel() + 2 * around}, fill, dense.options()).as_strided(dense.sizes(), dense.strides(), around);
    piece.copy_(dense);
    return kept.sizes() == tensor.sizes() ? piece : piece.expand(tensor.sizes());
  };
}

// What one device returns and writes; an operator that refuses returns nothing.
struct Answer {
  std::vector<at::Tensor> results, after;
};

Answer answered(const Operator& op, const Stack& arguments) {
  c10::NoGradGuard no_grad;
  FilledMemory memory(0x35);
  auto stack = arguments;
  torch::manual_seed(0);
  op.handle.callBoxed(&stack);
  return {tensors_in(stack, true), tensors_in(arguments, true)};
}

bool alike(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others, const std::vector<at::Tensor>& undetermined, double least) {
  if (some.size() != others.size()) return false;
  for (size_t i = 0; i < some.size(); ++i) {
    if (some[i].defined() != others[i].defined()) return false;
    if (!some[i].defined()) continue;
    const bool free = undetermined[i].defined() && undetermined[i].sizes() == some[i].sizes();
    const auto settled = [&](const at::Tensor& tensor) { return free ? tensor.masked_fill(undetermined[i], 0) : tensor; };
    if (some[i].sizes() != others[i].sizes() || !close(settled(others[i]), settled(some[i]), least)) return false;
  }
  return true;
}

bool answers_alike(const Operator& op, const Sample& sample, const Stack& arguments) {
  const auto answer = answered(op, arguments);
  const double least = rounding_of(sample);
  return alike(tensors_in(sample.results, true), answer.results, sample.undetermined, least) &&
         alike(tensors_in(sample.after, true), answer.after, sample.undetermined_after, least);
}

// Strides among the arguments count in the memory of the operand.
bool reads_addresses(const Operator& op) {
  const auto has = [&](const char* name) { return op.schema().argumentIndexWithName(name).has_value(); };
  return has("storage_offset") || (has("size") && has("stride")) || dispatch::info_of(op.handle).changes_metadata;
}

bool lie_in_row_major_order(const Stack& arguments) {
  const auto tensors = tensors_in(arguments);
  return std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.is_contiguous(); });
}

// An out= form writes all of its result.
Stack with_other_out(const Operator& op, const Stack& arguments) {
  auto copies = deep_copy(arguments);
  for (const auto i : out_arguments(op.schema())) {
    for (auto& tensor : tensors_in({copies[i]})) tensor.fill_(tensor.scalar_type() == at::kBool ? 0 : 5);
  }
  return copies;
}

}  // namespace

std::string unsound(const Operator& op, const Sample& sample) {
  if (is_uninitialized(op) || reads_addresses(op)) return "";
  try {
    if (is_out_form(op.schema()) && !answers_alike(op, sample, with_other_out(op, sample.arguments))) return "leaves of out= what it held";
    for (const double number : {0.25, 0.75}) {
      if (!answers_alike(op, sample, copied(sample.arguments, between(number)))) return "reads what lies beside its operands";
    }
    const bool ordered = is_random(op) || lie_in_row_major_order(sample.arguments);  // random numbers are drawn in the order of memory
    if (!ordered && !answers_alike(op, sample, copied(sample.arguments, in_row_major_order))) return "depends on the order of memory";
  } catch (const std::exception&) {
    return "refuses the same operands as they lie elsewhere";
  }
  return "";
}

}  // namespace dtensor::opcheck
