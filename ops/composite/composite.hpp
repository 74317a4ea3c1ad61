// Helpers of the kernels in the mode above autograd (composite.cpp).
#pragma once

#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/tensor/tensor.hpp>

#include <vector>

namespace dtensor::dispatch {

// The mode of every rank's thread, above autograd (rng/rank_generator.cpp).
constexpr c10::DispatchKey kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

inline c10::DispatchKeySet below(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMode);
}

// A tensor beside a distributed one: itself, or one that every rank made alike, replicated. Not for a caller's tensors, which operators
// check.
at::Tensor beside(const at::Tensor& distributed, const at::Tensor& tensor);

// What `make` gives as a plain tensor, also where factories make distributed ones.
template <class Make>
at::Tensor plain(Make&& make) {
  LocalMode local;
  return make();
}

// The elements of a tensor of whole numbers. Communicates where it is cut.
std::vector<int64_t> numbers(const at::Tensor& tensor);

}  // namespace dtensor::dispatch
