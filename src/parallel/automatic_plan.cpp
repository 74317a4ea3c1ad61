// Derives the plan of a transformer from its modules. It is compiled because the headers of torch::nn would more than double the
// compile time of <dtensor/dtensor.hpp>.
#include <dtensor/base/say.hpp>
#include <dtensor/parallel/plans.hpp>

#include <dtensor/mesh/world.hpp>

#include <range/v3/action/push_back.hpp>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <optional>

namespace dtensor {

namespace {

struct Layer {
  std::string name;
  int64_t in, out;
  std::optional<ParallelStyle> style{};
};

bool has_none(const Layer* layer) { return !layer->style; }

// First layers get their style with the inputs of their second one.
void pair(std::vector<Layer*> first, Layer& second) {
  if (first.empty()) return;
  const bool fused = first.size() == 1 && first[0]->out % second.in == 0;
  for (auto* layer : first) layer->style = ColwiseParallel(fused ? layer->out / second.in : 1);
  second.style = RowwiseParallel();
}

// Layers from a short vector to wide ones, as latent attention has them: they are first layers of their pair. Those that make the short
// vectors leave `widen` and stay whole: for each, the layer that has just its outputs or, of the others, the one with the fewest that are
// enough (keys have a part that goes past it).
std::vector<Layer*> take_latent(std::vector<Layer>& layers, std::vector<Layer*>& widen, int64_t width) {
  std::vector<Layer*> latent, whole;
  for (const bool just : {true, false}) {
    for (auto& layer : layers) {
      if (layer.in >= width || layer.out == width || std::ranges::count(latent, &layer) > 0) continue;
      Layer* best = nullptr;
      for (auto* from : widen) {
        const bool makes = just ? from->out == layer.in : from->out > layer.in && std::ranges::count(whole, from) == 0;
        if (makes && from->out < width && (!best || from->out < best->out)) best = from;
      }
      if (!best) continue;
      latent.push_back(&layer);
      whole.push_back(best);
    }
  }
  std::erase_if(widen, [&](Layer* l) { return std::ranges::count(whole, l) > 0; });
  return latent;
}

// Of the layers that one module holds.
void pair_up(std::vector<Layer>& layers, int64_t width) {
  std::vector<Layer*> squares, widen, narrow;
  for (auto& layer : layers) {
    if (layer.in == width && layer.out == width) squares.push_back(&layer);
    if (layer.in == width && layer.out != width) widen.push_back(&layer);
    if (layer.in != width && layer.out == width) narrow.push_back(&layer);
  }
  if (auto first = take_latent(layers, widen, width); !first.empty()) {
    ranges::push_back(first, widen);
    ranges::push_back(first, squares);
    auto* second = narrow.empty() ? nullptr : narrow.back();
    if (!second && !squares.empty()) second = squares.back(), first.pop_back();
    if (second) pair(std::move(first), *second);
    return;
  }
  const auto without_pair = [&](auto&& belongs) {
    std::vector<Layer*> found;
    std::ranges::copy_if(widen, std::back_inserter(found), [&](Layer* l) { return has_none(l) && belongs(*l); });
    return found;
  };
  for (auto* second : narrow) {
    auto first = without_pair([&](const Layer& l) { return l.out == second->in; });
    if (first.empty()) first = without_pair([&](const Layer& l) { return l.out % second->in == 0; });
    if (squares.empty() && !first.empty()) {  // grouped keys and values
      const auto fewer = without_pair([&](const Layer& l) { return l.out < second->in && second->in % l.out == 0; });
      ranges::push_back(first, fewer);
    }
    pair(std::move(first), *second);
  }
  if (squares.empty()) return;
  auto first = without_pair([](const Layer&) { return true; });
  first.insert(first.end(), squares.begin(), squares.end() - 1);
  pair(std::move(first), *squares.back());
}

void add(Plan& plan, const std::string& name, const ParallelStyle& style, const std::string& mesh_dim) {
  const auto entries = tensor_parallel({{name, style}}, mesh_dim);
  ranges::push_back(plan, entries);
}

struct Vocabulary {
  int64_t rows = 0, width = 0;
};

// That of the first embedding; the width of the first linear layer where there is none.
Vocabulary vocabulary_of(const torch::nn::Module& module) {
  for (const auto& child : module.modules(/*include_self=*/false)) {
    if (const auto* embedding = child->as<torch::nn::Embedding>()) return {embedding->weight.size(0), embedding->weight.size(1)};
  }
  for (const auto& child : module.modules(/*include_self=*/false)) {
    if (const auto* linear = child->as<torch::nn::Linear>()) return {0, linear->weight.size(1)};
  }
  return {};
}

// A plan that cuts nothing is a whole model on every rank, which nothing else would show.
void tell_of_nothing(const std::vector<std::string>& unpaired, int64_t width) {
  constexpr size_t kShown = 4;
  if (World::current().rank() != 0) return;
  std::string why = "the module has no linear layer";
  if (!unpaired.empty()) {
    const std::vector<std::string> shown(unpaired.begin(), unpaired.begin() + static_cast<int64_t>(std::min(kShown, unpaired.size())));
    why = fmt::format("no module holds a pair of linear layers, one from the model's width of {} and one back to it; alone are {}{}", width,
                      fmt::join(shown, ", "), unpaired.size() > kShown ? ", ..." : "");
  }
  detail::say("dtensor: automatic_plan cuts nothing, and every rank has the whole model: {}; hint: name the layers to cut with "
              "dt::tensor_parallel({{{{\"name\", dt::ColwiseParallel()}}, ...}}), or use dt::fully_shard\n", why);
}

}  // namespace

Plan automatic_plan(const torch::nn::Module& module, const std::string& mesh_dim, bool along_vocabulary) {
  const auto vocabulary = vocabulary_of(module);
  Plan plan;
  std::vector<std::string> unpaired;
  const auto visit = [&](const auto& self, const torch::nn::Module& holder, const std::string& prefix) -> void {
    std::vector<Layer> layers;
    for (const auto& child : holder.named_children()) {
      const auto* linear = child.value()->template as<torch::nn::Linear>();
      if (linear) layers.push_back({prefix + child.key(), linear->weight.size(1), linear->weight.size(0)});
      const auto* embedding = child.value()->template as<torch::nn::Embedding>();
      if (embedding && along_vocabulary) add(plan, prefix + child.key(), VocabParallel(), mesh_dim);
    }
    pair_up(layers, vocabulary.width);
    for (const auto& layer : layers) {
      const bool gives_logits = along_vocabulary && layer.in == vocabulary.width && layer.out == vocabulary.rows;
      if (layer.style || gives_logits) {
        add(plan, layer.name, layer.style ? *layer.style : VocabParallel(), mesh_dim);
      } else {
        unpaired.push_back(fmt::format("{} ({} to {})", layer.name, layer.in, layer.out));
      }
    }
    for (const auto& child : holder.named_children()) self(self, *child.value(), prefix + child.key() + ".");
  };
  visit(visit, module, "");
  if (plan.empty()) tell_of_nothing(unpaired, vocabulary.width);
  return plan;
}

}  // namespace dtensor
