// A model with experts from one without (Komatsuzaki et al., "Sparse Upcycling", 2023).
//
//   zoo::Llama3 dense(options), sparse(with_experts);      // with a MoE where the other has a SwiGLU
//   dtensor::nn::upcycle(*sparse, *dense);
#pragma once

#include <dtensor/nn/moe.hpp>

#include <fmt/ranges.h>

#include <map>
#include <set>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// Every expert of each MoE of `sparse` becomes a copy of the SwiGLU of its name in `dense`; all other parameters and buffers are copied by
// name. Routers, their biases and losses stay as they are. Where a token's weights add up to 1 (RouterOptions::normalize), `sparse` then
// computes what `dense` does, up to rounding. The two may lie in any layouts on one mesh, and `dense` may be plain in Spmd. Communicates
// what moves between the layouts. Throws, before it changes anything, where names or sizes do not fit, all listed together, and for layers
// with a shared expert, which would be added to the copies.
void upcycle(torch::nn::Module& sparse, const torch::nn::Module& dense);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

class Upcycling {
 public:
  Upcycling(torch::nn::Module& sparse, const torch::nn::Module& dense) {
    for (const auto& item : dense.named_parameters()) given_[item.key()] = item.value();
    for (const auto& item : dense.named_buffers()) given_[item.key()] = item.value();
    for (const auto& item : sparse.named_modules()) {
      if (auto* layer = dynamic_cast<MoEImpl*>(item.value().get())) plan_experts(*layer, item.key().empty() ? "" : item.key() + ".");
    }
    for (const auto& item : sparse.named_parameters()) plan_same(item.key(), item.value());
    for (const auto& item : sparse.named_buffers()) plan_same(item.key(), item.value());
    for (const auto& [name, tensor] : given_) {
      if (!used_.contains(name)) problems_ += fmt::format("; '{}' of the dense model has no place", name);
    }
    require(problems_.empty(), "upcycle", "{}; hint: the models differ in their layers of experts only",
            problems_.substr(std::min<size_t>(2, problems_.size())));
  }

  void run() const {
    const torch::NoGradGuard no_grad;
    for (const auto& [to, from] : copies_) to.copy_(from.dim() < to.dim() ? from.unsqueeze(0).expand(to.sizes()) : from);
  }

 private:
  void plan_experts(MoEImpl& layer, const std::string& name) {
    own_.insert(name + "gate.weight");
    if (layer.bias.defined()) own_.insert(name + "bias");
    if (layer.shared_experts) problems_ += fmt::format("; {}shared_experts would be added to the copies", name);
    const std::pair<const char*, at::Tensor> weights[] = {{"w1", layer.experts->w1}, {"w2", layer.experts->w2}, {"w3", layer.experts->w3}};
    for (const auto& [weight, experts] : weights) {
      own_.insert(fmt::format("{}experts.{}", name, weight));
      if (experts.defined()) plan(experts, fmt::format("{}{}.weight", name, weight), experts.sizes().slice(1));
    }
  }

  void plan_same(const std::string& name, const at::Tensor& tensor) {
    if (!own_.contains(name)) plan(tensor, name, tensor.sizes());
  }

  void plan(const at::Tensor& to, const std::string& name, c10::IntArrayRef sizes) {
    const auto found = given_.find(name);
    const bool fits = found != given_.end() && found->second.sizes() == sizes;
    if (!fits) {
      problems_ += fmt::format("; '{}' is {}, and the model of experts wants [{}]", name,
                               found == given_.end() ? "missing" : fmt::format("[{}]", fmt::join(found->second.sizes(), ", ")),
                               fmt::join(sizes, ", "));
    }
    used_.insert(name);
    if (fits) copies_.emplace_back(to, found->second);
  }

  std::map<std::string, at::Tensor> given_;  // the dense model's
  std::set<std::string> own_, used_;         // what the model of experts has for itself, and what it takes
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::string problems_;
};

}  // namespace detail

inline void upcycle(torch::nn::Module& sparse, const torch::nn::Module& dense) { detail::Upcycling(sparse, dense).run(); }

}  // namespace dtensor::nn

#pragma GCC visibility pop
