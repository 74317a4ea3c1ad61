// Replaces the tensors among a call's arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace dtensor::dispatch {

// The argument with `change` applied to its tensor, or to each tensor of its list.
template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& element : value.toListRef()) list.push_back(change(element.toTensor()));
    return list;
  }
  if (value.isList() && !value.toListRef().empty() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
    c10::List<c10::optional<at::Tensor>> list;
    for (const auto& element : value.toListRef()) {
      list.push_back(element.isNone() ? c10::optional<at::Tensor>() : c10::optional<at::Tensor>(change(element.toTensor())));
    }
    return list;
  }
  return value;
}

}  // namespace dtensor::dispatch
