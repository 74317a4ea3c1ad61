// A block with a layer of experts, in pieces: so the experts can lie on ranks of their own (dt::disaggregate).
#pragma once

#include <dtensor/nn/moe.hpp>
#include <dtensor/parallel/pipeline/cut.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// What a block does before and after its layer of experts.
struct AroundExperts {
  std::string modules;  // whose parameters these two use, by a pattern; empty: none
  // What the piece before gives -> the input of the layer of experts [..., dim], and what goes past it.
  std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& x)> before;
  // The output of the layer, as its input, and what went past it -> what the next piece takes.
  std::function<at::Tensor(const at::Tensor& y, const at::Tensor& past)> after;
};

// Three pieces: what comes before the experts, with the router; the experts ("NAME.experts"), which take rows, choices and weights; and
// what comes after, with the layer's shared experts. `name` is that of `layer` in the whole model, as "layers.3.feed_forward". One after
// the other they compute what the block does, bit for bit, and so are their gradients. Not for a layer whose choice is by hash.
std::vector<Piece> expert_pieces(const std::string& name, MoE layer, const AroundExperts& around);

// -- How ------------------------------------------------------------------------------------------------------------------

inline std::vector<Piece> expert_pieces(const std::string& name, MoE layer, const AroundExperts& around) {
  require(layer->options.router.choose_by != "hash", "expert_pieces",
          "{}: experts that are chosen by hash need the tokens' numbers, which pieces do not pass on", name);
  const bool shared = !layer->shared_experts.is_empty();
  const auto named = [&](std::string modules, const std::vector<std::pair<bool, std::string>>& more) {
    for (const auto& [is_there, module] : more) {
      if (is_there) modules += (modules.empty() ? "" : "|") + name + "." + module;
    }
    return modules;
  };
  pipelining::Skips past{.gives = {name + ".past"}};
  if (shared) past.gives.push_back(name + ".x");
  const auto before = [layer, shared, f = around.before](const at::Tensor& x) mutable {
    auto [input, went_past] = f(x);
    auto chosen = layer->choose(input);
    TensorVector results{std::move(chosen.x), std::move(chosen.experts), std::move(chosen.weights), std::move(went_past)};
    if (shared) results.push_back(std::move(input));
    return results;
  };
  const auto experts = [layer](const TensorVector& x) mutable { return layer->experts(x[0], x[1], x[2]); };
  const auto after = [layer, shared, f = around.after](const TensorVector& x) mutable {
    return f(layer->finish(x[0], shared ? x[2] : at::Tensor()), x[1]);
  };
  return {piece(named(around.modules, {{true, "gate"}, {layer->bias.defined(), "bias"}, {!layer->down.is_empty(), "down"}}), before, past),
          piece(name + ".experts", experts),
          piece(named("", {{!layer->up.is_empty(), "up"}, {shared, "shared_experts"}}), after, {.takes = past.gives})};
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
