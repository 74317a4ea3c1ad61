// The states of an optimizer, found by parameter.
#pragma once

#include <torch/optim/optimizer.h>

#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor::optim::detail {

// libtorch 1.13 uses the address of the parameter, as text, for the key.
template <class Key>
Key key_of(const at::Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream text;
    text << parameter.unsafeGetTensorImpl();
    return text.str();
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

template <class States>
auto find(States& states, const at::Tensor& parameter) {
  return states.find(key_of<typename std::remove_const_t<States>::key_type>(parameter));
}

using States = std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

}  // namespace dtensor::optim::detail

#pragma GCC visibility pop
