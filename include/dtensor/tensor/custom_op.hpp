// Your own operators and functions on distributed tensors: sharding rules for operators of TORCH_LIBRARY, and functions of local
// tensors.
#pragma once

#include <dtensor/rules/rule.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// Gives an operator its sharding rule, as an index structure: register_rule("my::op", "mk,kn->mn"). The notation has one term per
// tensor argument (skipped when an optional tensor is absent) and per returned tensor; see rules::einsum. `op` is a full name with
// or without overload ("my::op.out"). Without, the rule is for all overloads that have none of their own. The in-place form (op_)
// uses the rule too. Call it once per process, in any thread, before the operator's first call on distributed tensors.
// Communicates nothing. Throws, naming the operator, its schema and what to do, when there is no such operator, the notation is
// malformed or does not have the operator's number of terms, or the operator takes or returns lists of tensors.
void register_rule(std::string_view op, std::string_view notation, rules::Options options = {});

// The same for any rule, e.g. a class of your own derived from rules::Rule. `why` is the one-line reason that explain() shows.
void register_rule(std::string_view op, rules::RulePtr rule, std::string_view why);

struct LocalMapOptions {
  bool redistribute_inputs = true;                   // false: an input with other placements than declared is an error
  std::vector<std::vector<int64_t>> out_sizes = {};  // global sizes of the outputs; empty: found by exchanging shapes
  std::vector<Placements> in_gradients = {};         // placements of the inputs' gradients; empty: derived, see local_map
};

namespace detail {
using LocalFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> run_local_map(const LocalFunction& function, const DeviceMesh& mesh, const std::vector<Placements>& in,
                                      const std::vector<Placements>& out, const LocalMapOptions& options,
                                      const std::vector<at::Tensor>& inputs);

template <class Fn, size_t... I>
std::vector<at::Tensor> call_with(const Fn& fn, const std::vector<at::Tensor>& parts, std::index_sequence<I...>) {
  if constexpr (std::is_convertible_v<decltype(fn(parts[I]...)), at::Tensor>) {
    return {fn(parts[I]...)};
  } else {
    return fn(parts[I]...);
  }
}
}  // namespace detail

// Turns `fn`, a function of local tensors, into a function of distributed tensors. `fn` takes plain tensors and returns one plain
// tensor or a std::vector of them. The result takes and returns as many distributed ones.
//
//   auto f = dt::local_map(my_kernel, mesh, {{dt::shard(0)}, {dt::replicate()}}, {{dt::shard(0)}});
//   torch::Tensor y = f(x, w);
//
// Inputs are redistributed to the placements `in`, one list per input. Plain inputs count as replicated inside Spmd; elsewhere they
// are an error. Outputs are local tensors under the placements `out`. Unless options.out_sizes gives their global sizes, one small
// all_gather per output finds them. `fn` runs outside of Spmd, and may communicate by itself.
//
// Differentiable, through fn's own graph. An input's gradient has the input's placements, with one exception: where the input is
// Replicate on a mesh dimension and another input or an output is not, the ranks' gradients add up, so it is Partial(sum). Where
// all inputs and outputs are Replicate, every rank computes the same, and the gradient is Replicate. options.in_gradients
// overrides this.
//
// Throws for a wrong number of inputs or outputs, for outputs whose local sizes do not fit `out`, and for an input with other
// placements when options.redistribute_inputs is false.
template <class Fn>
auto local_map(Fn fn, DeviceMesh mesh, std::vector<Placements> in, std::vector<Placements> out, LocalMapOptions options = {}) {
  return [fn = std::move(fn), mesh = std::move(mesh), in = std::move(in), out = std::move(out),
          options = std::move(options)](const auto&... inputs) {
    constexpr bool one = std::is_convertible_v<decltype(fn(static_cast<const at::Tensor&>(inputs)...)), at::Tensor>;
    const detail::LocalFunction local = [&fn](const std::vector<at::Tensor>& parts) {
      return detail::call_with(fn, parts, std::make_index_sequence<sizeof...(inputs)>());
    };
    auto outputs = detail::run_local_map(local, mesh, in, out, options, {static_cast<const at::Tensor&>(inputs)...});
    if constexpr (one) {
      return std::move(outputs[0]);
    } else {
      return outputs;
    }
  };
}

}  // namespace dtensor

#pragma GCC visibility pop
