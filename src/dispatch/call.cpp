// Implements rules::Call: an operator call as rules see it.
#include <dtensor/base/error.hpp>
#include <dtensor/rules/rule.hpp>

#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <ATen/core/dispatch/Dispatcher.h>

namespace dtensor::rules {

namespace {

void add_operand(Call& call, const c10::IValue& value, int argument, int element) {
  if (!value.isTensor()) return;
  const auto& tensor = value.toTensor();
  if (!tensor.defined()) return;
  if (auto* impl = as_dtensor(tensor)) {
    call.operands.push_back({impl->layout(), argument, element, false, impl->pinned});
    return;
  }
  const Placements replicated(call.mesh.ndim(), replicate());
  auto layout = Layout::get(call.mesh, replicated, tensor.sizes(), tensor.strides(), tensor.scalar_type());
  call.operands.push_back({std::move(layout), argument, element, true});
}

}  // namespace

Call::Call(const c10::FunctionSchema& s, c10::ArrayRef<c10::IValue> a, DeviceMesh m)
    : schema(s), arguments(a), mesh(std::move(m)) {
  for (int i = 0; i < static_cast<int>(arguments.size()); ++i) {
    if (!arguments[i].isList()) {
      add_operand(*this, arguments[i], i, -1);
      continue;
    }
    const auto list = arguments[i].toListRef();
    for (int j = 0; j < static_cast<int>(list.size()); ++j) add_operand(*this, list[j], i, j);
  }
  for (const auto& operand : operands) chosen.emplace_back(operand.placements().begin(), operand.placements().end());
}

int Call::operand_index(int argument, int element) const {
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].argument == argument && operands[i].element == element) return static_cast<int>(i);
  }
  return -1;
}

const Operand* Call::operand(int argument, int element) const {
  const int i = operand_index(argument, element);
  return i < 0 ? nullptr : &operands[i];
}

int Call::argument_index(std::string_view name) const {
  const auto& all = schema.arguments();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].name() == name) return static_cast<int>(i);
  }
  return -1;
}

const c10::IValue& Call::arg(std::string_view name) const {
  const int i = argument_index(name);
  require(i >= 0, schema.name(), "a sharding rule asks for argument '{}', which the operator does not have", name);
  return arguments[i];
}

int64_t Call::int_arg(std::string_view name) const { return arg(name).toInt(); }

bool Call::bool_arg(std::string_view name, bool if_none) const {
  const auto& value = arg(name);
  return value.isNone() ? if_none : value.toBool();
}

std::vector<int64_t> Call::ints_arg(std::string_view name) const {
  const auto& value = arg(name);
  if (value.isNone()) return {};
  if (value.isInt()) return {value.toInt()};
  std::vector<int64_t> numbers;
  for (const auto& element : value.toListRef()) numbers.push_back(element.toInt());
  return numbers;
}

std::vector<OutputMeta> Rule::output_metas(const Call& call) const {
  std::vector<OutputMeta> metas;
  for (auto& sizes : output_sizes(call)) {
    auto strides = contiguous_strides(sizes);
    metas.push_back({std::move(sizes), std::move(strides), call.operands[0].layout->dtype(), true});
  }
  return metas;
}

void LocalCall::call() {
  LocalMode local;
  op.callBoxed(&stack);
}

void LocalCall::replace(std::vector<c10::IValue> results) {
  stack.resize(begin);
  for (auto& result : results) stack.push_back(std::move(result));
}

}  // namespace dtensor::rules
