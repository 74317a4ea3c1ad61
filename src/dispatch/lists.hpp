// Lists of tensors among the arguments and results of a call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace dtensor::dispatch {

template <class Element, class Tensors>
c10::IValue typed_list(const Tensors& elements) {
  c10::List<Element> list;
  list.reserve(elements.size());
  for (const auto& element : elements) {
    if constexpr (std::is_same_v<Element, at::Tensor>) {
      list.push_back(element);
    } else {
      list.push_back(element.defined() ? Element(element) : Element());
    }
  }
  return list;
}

// A tensor list with `change` applied to each element; other values are returned as they are.
template <class Change>
c10::IValue map_list(const c10::IValue& value, Change&& change) {
  const auto elements = value.toListRef();
  const bool optional = !value.isTensorList();
  if (optional && std::none_of(elements.begin(), elements.end(), [](const auto& e) { return e.isTensor(); })) return value;
  std::vector<at::Tensor> tensors;
  tensors.reserve(elements.size());
  for (size_t i = 0; i < elements.size(); ++i) {
    tensors.push_back(elements[i].isTensor() ? change(elements[i].toTensor(), static_cast<int>(i)) : at::Tensor());
  }
  return optional ? typed_list<c10::optional<at::Tensor>>(tensors) : typed_list<at::Tensor>(tensors);
}

}  // namespace dtensor::dispatch
