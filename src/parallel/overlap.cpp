#include <dtensor/parallel/overlap.hpp>

#include "src/parallel/tiles.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/parallel/marks.hpp>

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <range/v3/action/push_back.hpp>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace dtensor {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local int64_t pieces_now = 1;

const Tiles& tiles_of(AutogradContext* context) { return static_cast<const Tiles&>(*context->saved_data["tiles"].toCapsule()); }

c10::optional<at::Tensor> optional(at::TensorList biases, size_t i) {
  return biases.empty() ? c10::optional<at::Tensor>() : biases[i];
}

void check_once(const char* what) {
  require(!c10::GradMode::is_enabled(), what,
          "a backward pass in pieces has no backward of its own; hint: no create_graph inside of OverlapLinear");
}

bool is_trained(const at::Tensor& parameter) { return parameter.defined() && parameter.requires_grad(); }

// Adds gradients of tiles up: of a weight [out, in] and a bias [out], from [ranks, rows, out] and [ranks, rows, in].
class LayerGradient {
 public:
  LayerGradient(bool of_weight, bool of_bias) : of_weight_(of_weight), of_bias_(of_bias) {}

  void add(const at::Tensor& of_output, const at::Tensor& input) {
    const auto y = local_shard(of_output).flatten(0, 1), x = local_shard(input).flatten(0, 1);
    if (of_weight_) weight_ = weight_.defined() ? weight_.addmm_(y.t(), x) : at::mm(y.t(), x);
    if (of_bias_) bias_ = bias_.defined() ? bias_.add_(y.sum(0)) : y.sum(0);
  }
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return bias_; }

 private:
  bool of_weight_, of_bias_;
  at::Tensor weight_, bias_;
};

// Layers have biases all or none.
struct GatherLinear : torch::autograd::Function<GatherLinear> {
  static variable_list forward(AutogradContext* context, const TilesPtr& tiles, const at::Tensor& x, at::TensorList weights,
                               at::TensorList biases) {
    context->set_materialize_grads(false);
    context->saved_data["tiles"] = c10::IValue::make_capsule(tiles);
    context->saved_data["input_too"] = x.requires_grad();
    const auto inputs = tiles->gather(x);
    std::vector<std::vector<at::Tensor>> outputs(weights.size());
    for (const auto& tile : inputs) {
      for (size_t i = 0; i < outputs.size(); ++i) outputs[i].push_back(at::linear(tile, weights[i], optional(biases, i)));
    }
    variable_list saved(weights.begin(), weights.end());
    ranges::push_back(saved, biases);
    ranges::push_back(saved, tiles->gathers() ? inputs : std::vector<at::Tensor>{x});
    context->save_for_backward(std::move(saved));
    variable_list results;
    for (const auto& output : outputs) results.push_back(tiles->join_across(output));
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    check_once("gather_linear");
    const auto& tiles = tiles_of(context);
    const bool input_too = context->saved_data["input_too"].toBool();
    const auto saved = context->get_saved_variables();
    const auto inputs = tiles.gathers() ? variable_list(saved.end() - tiles.pieces(), saved.end()) : tiles.gather(saved.back());
    const auto parameters = at::TensorList(saved).slice(0, saved.size() - (tiles.gathers() ? tiles.pieces() : 1));
    const auto weights = parameters.slice(0, gradients.size()), biases = parameters.slice(gradients.size());
    std::vector<at::Tensor> across(gradients.size()), of_input;
    std::vector<LayerGradient> of_layers;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) across[i] = tiles.across(gradients[i]);
      of_layers.emplace_back(is_trained(weights[i]), !biases.empty() && is_trained(biases[i]));
    }
    for (int64_t piece = 0; piece < tiles.pieces(); ++piece) {
      at::Tensor sum;
      std::vector<at::Tensor> of_outputs(gradients.size());
      for (size_t i = 0; i < gradients.size(); ++i) {
        if (!across[i].defined()) continue;
        of_outputs[i] = tiles.tile_across(across[i], piece);
        if (!input_too) continue;
        const auto product = at::matmul(of_outputs[i], weights[i]);
        sum = sum.defined() ? sum.add_(product) : product;
      }
      if (input_too) of_input.push_back(tiles.reduce(sum));
      for (size_t i = 0; i < gradients.size(); ++i) {
        if (across[i].defined()) of_layers[i].add(of_outputs[i], inputs[piece]);
      }
    }
    variable_list results{at::Tensor(), input_too ? tiles.join(of_input) : at::Tensor()};
    for (size_t i = 0; i < weights.size(); ++i) results.push_back(tiles.summed(of_layers[i].weight(), weights[i], tiles.cut(0)));
    for (size_t i = 0; i < biases.size(); ++i) results.push_back(tiles.summed(of_layers[i].bias(), biases[i], tiles.cut(0)));
    return results;
  }
};

struct LinearReduce : torch::autograd::Function<LinearReduce> {
  static at::Tensor forward(AutogradContext* context, const TilesPtr& tiles, const at::Tensor& x, const at::Tensor& weight,
                            const c10::optional<at::Tensor>& bias) {
    context->set_materialize_grads(false);
    context->saved_data["tiles"] = c10::IValue::make_capsule(tiles);
    context->save_for_backward({x, weight, bias.value_or(at::Tensor())});
    const auto across = tiles->across(x);
    std::vector<at::Tensor> reduced;
    for (int64_t piece = 0; piece < tiles->pieces(); ++piece) {
      reduced.push_back(tiles->reduce(at::linear(tiles->tile_across(across, piece), weight, bias)));
    }
    return tiles->join(reduced);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    check_once("linear_reduce");
    const auto& tiles = tiles_of(context);
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &bias = saved[2];
    const auto of_output = tiles.gather(gradients[0]);
    const auto across = tiles.across(x);
    std::vector<at::Tensor> of_input;
    LayerGradient of_layer(is_trained(weight), is_trained(bias));
    for (int64_t piece = 0; piece < tiles.pieces(); ++piece) {
      of_input.push_back(at::matmul(of_output[piece], weight));
      of_layer.add(of_output[piece], tiles.tile_across(across, piece));
    }
    return {at::Tensor(), tiles.join_across(of_input), tiles.summed(of_layer.weight(), weight, tiles.cut(1)),
            tiles.summed(of_layer.bias(), bias, replicate())};
  }
};

}  // namespace

std::vector<at::Tensor> gather_linear(const at::Tensor& x, const std::vector<LinearLayer>& layers) {
  if (layers.empty()) return {};
  if (const auto tiles = Tiles::of_columns(x, layers, pieces_now)) {
    std::vector<at::Tensor> weights, biases;
    for (const auto& layer : layers) {
      weights.push_back(layer.weight);
      if (layer.bias.defined()) biases.push_back(layer.bias);
    }
    return GatherLinear::apply(tiles, x, at::TensorList(weights), at::TensorList(biases));
  }
  const auto whole = prepare_input(x, layers[0].weight);
  std::vector<at::Tensor> outputs;
  for (const auto& layer : layers) outputs.push_back(at::linear(whole, layer.weight, layer.bias));
  return outputs;
}

at::Tensor linear_reduce(const at::Tensor& x, const LinearLayer& layer, const at::Tensor& like) {
  if (const auto tiles = Tiles::of_rows(x, layer, like, pieces_now))
    return LinearReduce::apply(tiles, x, layer.weight, c10::optional<at::Tensor>(layer.bias));
  return lay_out_like(at::linear(x, layer.weight, layer.bias), like);
}

int64_t OverlapLinear::pieces() { return pieces_now; }

OverlapLinear::OverlapLinear(int64_t pieces) {
  require(pieces >= 1, "OverlapLinear", "expected one piece or more; got {}", pieces);
  before_ = std::exchange(pieces_now, pieces);
}
OverlapLinear::~OverlapLinear() { pieces_now = before_; }

}  // namespace dtensor
