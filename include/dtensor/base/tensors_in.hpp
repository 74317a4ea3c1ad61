// The tensors among the arguments or results of an operator call, which are IValues: tensors, lists of them, and other things.
//
//   for (const auto& [tensor, argument, element] : dtensor::tensors_in(arguments)) ...
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <type_traits>

#pragma GCC visibility push(default)

namespace dtensor {

// A tensor, which may be undefined, and where it is: argument `argument` itself (element -1), or one of its list.
struct TensorIn {
  const at::Tensor& tensor;
  int argument;
  int element;
};

// A range of TensorIn, in the order of the values.
class TensorsIn {
 public:
  explicit TensorsIn(c10::ArrayRef<c10::IValue> values) : values_(values) {}

  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using difference_type = std::ptrdiff_t;
    using value_type = TensorIn;

    explicit Iterator(c10::ArrayRef<c10::IValue> values) : values_(values) { find(); }
    TensorIn operator*() const {
      const auto& place = element_ < 0 ? values_[argument_] : elements_[element_];
      return {place.toTensor(), static_cast<int>(argument_), element_};
    }
    Iterator& operator++() {
      if (element_ < 0) {
        ++argument_;
      } else if (!find_in_list(element_ + 1)) {
        ++argument_;
        element_ = -1;
      } else {
        return *this;
      }
      find();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return argument_ == values_.size(); }

   private:
    // Goes on to the first tensor of this argument or a later one.
    void find() {
      for (; argument_ < values_.size(); ++argument_) {
        const auto& value = values_[argument_];
        if (value.isTensor()) return;
        if (!value.isList()) continue;
        elements_ = value.toListRef();
        if (find_in_list(0)) return;
      }
    }
    // Whether the list has a tensor at `from` or later; goes there.
    bool find_in_list(int from) {
      const int size = static_cast<int>(elements_.size());
      while (from < size && !elements_[from].isTensor()) ++from;
      if (from < size) element_ = from;
      return from < size;
    }

    c10::ArrayRef<c10::IValue> values_, elements_;  // elements_: of the argument, where it is a list
    size_t argument_ = 0;
    int element_ = -1;
  };

  Iterator begin() const { return Iterator(values_); }
  static std::default_sentinel_t end() { return {}; }

 private:
  c10::ArrayRef<c10::IValue> values_;
};

// Those of one value too. The values are not copied, and have to live as long as the range.
inline TensorsIn tensors_in(c10::ArrayRef<c10::IValue> values) { return TensorsIn(values); }
template <std::same_as<c10::IValue> Temporary>
TensorsIn tensors_in(Temporary&&) = delete;

// Whether `holds(tensor)` for one of them that is defined.
template <class Holds>
bool any_tensor(c10::ArrayRef<c10::IValue> values, Holds&& holds) {
  return std::ranges::any_of(tensors_in(values), [&](const TensorIn& in) { return in.tensor.defined() && holds(in.tensor); });
}

// The tensor that a value is (element -1), or that its list has.
inline const at::Tensor& tensor_at(const c10::IValue& value, int element) {
  return element < 0 ? value.toTensor() : value.toListRef()[element].toTensor();
}

// The value with `change(tensor)`, or `change(tensor, element)`, in place of its tensor, or of each tensor of its list. In a list of
// optional tensors, none stays none, and an undefined tensor becomes none. Other values are returned as they are.
template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change&& change) {
  const auto changed = [&](const c10::IValue& old, int element) -> at::Tensor {
    if constexpr (std::is_invocable_v<Change, const at::Tensor&, int>) {
      return change(old.toTensor(), element);
    } else {
      return change(old.toTensor());
    }
  };
  if (value.isTensor()) return changed(value, -1);
  if (!value.isList()) return value;
  const auto elements = value.toListRef();
  const int size = static_cast<int>(elements.size());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    list.reserve(elements.size());
    for (int i = 0; i < size; ++i) list.push_back(changed(elements[i], i));
    return list;
  }
  if (std::ranges::none_of(elements, &c10::IValue::isTensor)) return value;
  c10::List<c10::optional<at::Tensor>> list;
  list.reserve(elements.size());
  for (int i = 0; i < size; ++i) {
    const auto tensor = elements[i].isTensor() ? changed(elements[i], i) : at::Tensor();
    list.push_back(tensor.defined() ? c10::optional<at::Tensor>(tensor) : c10::nullopt);
  }
  return list;
}

}  // namespace dtensor

#pragma GCC visibility pop
