// An operator's outputs on one device, found by running it on meta tensors of the global sizes.
#include "src/dispatch/decide.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/guard.hpp"

#include <ATen/ops/empty_strided.h>
#include <dtensor/error.hpp>

namespace dtensor::dispatch {

namespace {

const c10::Device kMeta(c10::DeviceType::Meta);

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()).device(kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

c10::IValue on_meta(const c10::IValue& value) {
  if (value.isTensor()) return on_meta(value.toTensor());
  if (value.isDevice()) return kMeta;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& element : value.toListRef()) list.push_back(on_meta(element.toTensor()));
    return list;
  }
  if (value.isList() && !value.toListRef().empty() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
    c10::List<c10::optional<at::Tensor>> list;
    for (const auto& element : value.toListRef()) {
      list.push_back(element.isNone() ? c10::optional<at::Tensor>() : c10::optional<at::Tensor>(on_meta(element.toTensor())));
    }
    return list;
  }
  return value;
}

void collect(const c10::IValue& value, std::vector<rules::OutputMeta>& outputs) {
  if (value.isTensor()) {
    const auto tensor = value.toTensor();
    if (tensor.defined()) {
      outputs.push_back({Sizes(tensor.sizes().begin(), tensor.sizes().end()),
                         Sizes(tensor.strides().begin(), tensor.strides().end()), tensor.scalar_type(), true, tensor.storage_offset()});
    } else {
      outputs.push_back({{}, {}, c10::ScalarType::Float, false});
    }
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) collect(element, outputs);
  }
}

// A missing kernel, as opposed to operands that the operator refuses.
bool is_missing_kernel(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  for (const char* part : {"Could not run", "meta", "Meta", "not implemented", "storage", "data pointer"}) {
    if (text.find(part) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

std::vector<rules::OutputMeta> meta_outputs(const c10::OperatorHandle& op, const rules::Call& call) {
  LocalMode local;
  Stack stack;
  for (const auto& argument : call.arguments) stack.push_back(on_meta(argument));
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error& error) {
    if (is_missing_kernel(error)) return {};
    fail(call.schema.name(), "{}; got {}", error.what_without_backtrace(), describe(call));
  }
  std::vector<rules::OutputMeta> outputs;
  for (const auto& value : stack) collect(value, outputs);
  return outputs;
}

}  // namespace dtensor::dispatch
