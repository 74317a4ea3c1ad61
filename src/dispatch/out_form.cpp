#include "src/dispatch/out_form.hpp"

#include "src/dispatch/decide.hpp"

#include <dtensor/error.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

namespace dtensor::dispatch {

namespace {

void append_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isTensorList()) {
    for (const auto& element : value.toListRef()) tensors.push_back(element.toTensor());
  }
}

void copy_result(const OpInfo& info, const at::Tensor& out, const at::Tensor& result) {
  require(c10::canCast(result.scalar_type(), out.scalar_type()), info.name,
          "result type {} can't be cast to the desired output type {}", c10::toString(result.scalar_type()),
          c10::toString(out.scalar_type()));
  if (out.numel() == 0 && out.sizes() != result.sizes() && is_dtensor_impl(out.unsafeGetTensorImpl()) &&
      out.scalar_type() == result.scalar_type()) {
    out.unsafeGetTensorImpl()->shallow_copy_from(result.getIntrusivePtr());  // as libtorch makes room in an empty tensor
    return;
  }
  require(out.sizes() == result.sizes(), info.name,
          "out= has sizes [{}]; expected [{}]; hint: a distributed tensor cannot be resized; give one of the result's sizes, or use "
          "the form that returns a new tensor",
          fmt::join(out.sizes(), ", "), fmt::join(result.sizes(), ", "));
  out.copy_(result);
}

}  // namespace

namespace {

// Reductions compute in the dtype of `out`, unless they are told another.
const std::unordered_set<std::string> kInDtypeOfOut{"aten::sum",  "aten::nansum", "aten::mean",
                                                    "aten::prod", "aten::cumsum", "aten::cumprod"};

void tell_dtype(const OpInfo& info, const at::Tensor& out, Stack& functional) {
  const auto at = kInDtypeOfOut.count(info.schema->name()) ? info.functional->schema().argumentIndexWithName("dtype") : c10::nullopt;
  if (at && functional[*at].isNone()) functional[*at] = static_cast<int64_t>(out.scalar_type());
}

}  // namespace

void run_out_form(const OpInfo& info, Stack& stack, size_t begin) {
  const auto& arguments = info.schema->arguments();
  const auto first = std::find_if(arguments.begin(), arguments.end(), [](const c10::Argument& argument) { return argument.is_out(); });
  const auto inputs = begin + static_cast<size_t>(first - arguments.begin());
  check_out_form(info, c10::ArrayRef<c10::IValue>(stack).slice(begin));
  std::vector<at::Tensor> outs, results;
  for (size_t i = inputs; i < stack.size(); ++i) append_tensors(stack[i], outs);
  Stack functional(stack.begin() + static_cast<int64_t>(begin), stack.begin() + static_cast<int64_t>(inputs));
  std::vector<c10::IValue> returned(stack.begin() + static_cast<int64_t>(inputs), stack.end());
  if (!outs.empty()) tell_dtype(info, outs[0], functional);
  info.functional->callBoxed(&functional);
  for (const auto& value : functional) append_tensors(value, results);
  for (size_t i = 0; i < outs.size() && i < results.size(); ++i) copy_result(info, outs[i], results[i]);
  stack.resize(begin);
  if (!info.schema->returns().empty()) stack.insert(stack.end(), returned.begin(), returned.end());
}

}  // namespace dtensor::dispatch
