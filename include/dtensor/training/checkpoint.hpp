// Activation checkpointing trades computation for memory: what a function saves for backward is dropped after the forward pass, and
// computed again when the backward pass needs it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

struct CheckpointOptions {
  // Operators whose results are kept in memory and not computed again: "aten::mm", or one overload, "aten::mm.out".
  std::vector<std::string> save = {};
  // Whether the function draws the same random numbers again.
  bool preserve_random = true;
};

// Names for CheckpointOptions::save: matrix products, convolutions and attention kernels, where nearly all of the time goes.
std::vector<std::string> matrix_products();

namespace detail {

using Tensors = std::vector<at::Tensor>;

// While it lives, what this thread saves for backward is dropped; when it is needed, `again` is called with `inputs` to compute it.
class CheckpointRegion {
 public:
  using Function = std::function<void(const Tensors& inputs)>;
  CheckpointRegion(Tensors inputs, Function again, const CheckpointOptions& options);
  ~CheckpointRegion();
  CheckpointRegion(const CheckpointRegion&) = delete;
  CheckpointRegion& operator=(const CheckpointRegion&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Take the tensors out of an argument, in order, and put them back.
template <class T>
const T& take_tensors(const T& argument, Tensors&) {
  return argument;
}
inline at::Tensor take_tensors(const at::Tensor& argument, Tensors& tensors) {
  tensors.push_back(argument);
  return {};
}
inline Tensors take_tensors(const Tensors& argument, Tensors& tensors) {
  tensors.insert(tensors.end(), argument.begin(), argument.end());
  return Tensors(argument.size());
}

template <class T>
void put_tensors(T&, const at::Tensor*&) {}
inline void put_tensors(at::Tensor& argument, const at::Tensor*& next) { argument = *next++; }
inline void put_tensors(Tensors& argument, const at::Tensor*& next) {
  for (auto& tensor : argument) tensor = *next++;
}

}  // namespace detail

// Calls function(inputs...) and returns its result. Frees the memory of what the function saves for backward; the backward pass calls the
// function once more. Gradients have the bits of a run without checkpointing: the second call starts from the same random state (afterwards
// the streams go on as if it had not been), under the same autocast setting and in the same dt::Spmd region. It ends as soon as all that
// had been saved is there again. A backward pass that keeps the graph (the first of two halves does) keeps what was computed again too, as
// long as the graph needs it.
//
//   y = dt::checkpoint(block, x, mask);                        // a module, a lambda, ...
//   y = dt::checkpoint({.save = dt::matrix_products()}, block, x);
//
// Tensors and std::vectors of tensors among `inputs` are kept as autograd keeps them (writing to one before backward is an error). Other
// inputs are copied, and so is the function. What the function refers to has to live until backward.
//
// The function may use tensors that are not inputs (parameters), may be nested, and may return anything. It must do the same again. What
// else it changes (running statistics) it changes twice. Communicates what the function communicates, twice. With gradients off, it is just
// called.
//
// An operator named in options.save must return new tensors, and its results must not be written to in place.
//
// Throws for a name in options.save that is no operator, or one that writes to its operands. Throws in backward when the second call saves
// something else than the first. (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; with operators kept: Korthikanti et
// al., "Reducing Activation Recomputation in Large Transformer Models", 2022.)
template <class Function, class... Inputs>
auto checkpoint(const CheckpointOptions& options, Function function, const Inputs&... inputs) {
  detail::Tensors tensors;
  std::tuple<std::decay_t<const Inputs>...> rest{detail::take_tensors(inputs, tensors)...};
  const detail::CheckpointRegion region(
      std::move(tensors),
      [function, rest = std::move(rest)](const detail::Tensors& given) mutable {
        auto arguments = rest;
        const at::Tensor* next = given.data();
        std::apply([&](auto&... argument) { (detail::put_tensors(argument, next), ...); }, arguments);
        std::apply(function, std::as_const(arguments));
      },
      options);
  return function(inputs...);
}

template <class Function, class... Inputs, class = std::enable_if_t<!std::is_same_v<Function, CheckpointOptions>>>
auto checkpoint(Function function, const Inputs&... inputs) {
  return checkpoint(CheckpointOptions(), std::move(function), inputs...);
}

}  // namespace dtensor

#pragma GCC visibility pop
