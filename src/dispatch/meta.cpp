// An operator's outputs on one device, found by running it on meta tensors of the global sizes.
#include "src/dispatch/decide.hpp"
#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_strided.h>
#include <dtensor/base/error.hpp>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <unordered_set>

namespace dtensor::dispatch {

namespace {

const c10::Device kMeta(c10::DeviceType::Meta);

rules::OutputMeta meta_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {{}, {}, c10::ScalarType::Float, false};
  return {Sizes(tensor.sizes().begin(), tensor.sizes().end()), Sizes(tensor.strides().begin(), tensor.strides().end()),
          tensor.scalar_type(), true, tensor.storage_offset()};
}

bool may_run_on_meta(const c10::OperatorHandle& op, const rules::Call& call) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return true;
  // Of empty tensors, what an operator is composed of may give other sizes than its kernel does (the statistics of layer_norm). Not views.
  const auto& returns = op.schema().returns();
  const bool view = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  const auto empty = [](const rules::Operand& operand) { return c10::multiply_integers(operand.sizes()) == 0; };
  if (!view && std::ranges::any_of(call.operands, empty)) return false;
  // Kernels of others may read memory without asking where it is.
  const bool custom = op.schema().name().compare(0, 6, "aten::") != 0;
  return !custom && (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                     op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                     op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
}

// Operators that turned out to need a kernel which libtorch lacks: an exception costs milliseconds. By thread, so that what a rank
// knows comes from its own calls, which are those of all ranks.
std::unordered_set<const c10::FunctionSchema*>& without_kernel() {
  static thread_local std::unordered_set<const c10::FunctionSchema*> schemas;
  return schemas;
}

// A missing kernel, as opposed to operands that the operator refuses.
bool is_missing_kernel(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  for (const char* part : {"Could not run", "meta", "Meta", "not implemented", "storage", "data pointer", "tensor backend other than",
                           "not allocated", "expects CPU tensor"}) {
    if (text.find(part) != std::string::npos) return true;
  }
  return false;
}

// The dtype in which a pointwise operator computes, by its operands and its result (int / int -> float).
at::ScalarType computed_in(const rules::Call& call, at::ScalarType result) {
  at::native::ResultTypeState state;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& argument = call.arguments[i];
    if (argument.isTensor() && argument.toTensor().defined()) state = at::native::update_result_type_state(argument.toTensor(), state);
    const bool number = call.schema.arguments()[i].type()->kind() == c10::TypeKind::NumberType;
    if (number && argument.isScalar()) state = at::native::update_result_type_state(argument.toScalar(), state);
  }
  const auto common = at::native::result_type(state);
  return c10::isIntegralType(common, /*includeBool=*/true) && !c10::isIntegralType(result, /*includeBool=*/true) ? result : common;
}

// The operands that a pointwise operator converts before it looks at their strides, and whose copies lie otherwise than they do: on the
// CPU, those of another dtype than it computes in, with elements that share memory or leave gaps. Meta kernels convert nothing.
struct Converted {
  at::ScalarType to{};
  std::unordered_set<const c10::TensorImpl*> operands;
};

Converted converted(const rules::Call& call, const Stack& results) {
  Converted found;
  const auto* entry = rules::find_entry(call.schema);
  if (!entry || entry->family != "pointwise" || results.empty() || !results[0].isTensor() || !results[0].toTensor().defined()) return found;
  found.to = computed_in(call, results[0].toTensor().scalar_type());
  for (const auto& [tensor, argument, element] : tensors_in(call.arguments)) {
    const auto& name = call.schema.arguments()[argument].name();
    if (!tensor.defined() || !tensor.is_cpu() || name == "condition" || name == "mask") continue;
    if (tensor.scalar_type() != found.to && !tensor.is_non_overlapping_and_dense()) found.operands.insert(tensor.unsafeGetTensorImpl());
  }
  return found;
}

}  // namespace

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  LocalMode local;
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()).device(kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

void check_out_form(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(info.schema->name().c_str(), info.schema->overload_name().c_str());
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return;
  if (info.schema->returns().size() != 1) return;  // boxed kernels return several `out` by references to arguments that are gone
  LocalMode local;
  Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(argument.isDevice() ? c10::IValue(kMeta) : with_tensors(argument, on_meta));
  }
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error& error) {
    const std::string words = error.what_without_backtrace();
    if (words.find("dtype") != std::string::npos) fail(info.name, "{}", words);
  }
}

c10::optional<Stack> meta_results(const c10::OperatorHandle& op, const rules::Call& call, const ToMeta& to_meta) {
  if (!may_run_on_meta(op, call) || selects_by_mask(call) || without_kernel().count(&call.schema)) return c10::nullopt;
  LocalMode local;
  Stack stack;
  stack.reserve(call.arguments.size());
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const bool device = call.arguments[i].isDevice() || (call.operands.empty() && call.schema.arguments()[i].name() == "device");
    stack.push_back(device ? c10::IValue(kMeta) : with_tensors(call.arguments[i], to_meta));
  }
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error& error) {
    if (is_missing_kernel(error)) {
      if (std::string(error.what_without_backtrace()).find("Could not run") != std::string::npos) without_kernel().insert(&call.schema);
      return c10::nullopt;
    }
    if (rehearse(op, call)) return c10::nullopt;  // some meta kernels refuse empty tensors that kernels take
    fail(call.schema.name(), "{}; got {}", error.what_without_backtrace(), describe(call));
  }
  return stack;
}

c10::optional<std::vector<rules::OutputMeta>> meta_outputs(const c10::OperatorHandle& op, const rules::Call& call) {
  auto results = meta_results(op, call, on_meta);
  if (!results) return c10::nullopt;
  if (const auto copies = converted(call, *results); !copies.operands.empty()) {
    results = meta_results(op, call, [&](const at::Tensor& tensor) {
      const auto meta = on_meta(tensor);
      if (!copies.operands.contains(tensor.unsafeGetTensorImpl())) return meta;
      return meta.to(copies.to).to(meta.scalar_type());  // there and back: the copy's strides, the operand's dtype
    });
  }
  std::vector<rules::OutputMeta> outputs;
  for (const auto& in : tensors_in(*results)) outputs.push_back(meta_of(in.tensor));
  return outputs;
}

}  // namespace dtensor::dispatch
