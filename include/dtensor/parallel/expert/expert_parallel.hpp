// Cutting the experts of a model over ranks.
//
//   auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "ep"});
//   dt::Spmd spmd(mesh);
//   Model model(options);                                // with layers of dtensor/nn/moe.hpp
//   dt::expert_parallel(*model, mesh);                   // each rank has half of the experts
//   x = dt::distribute_tensor(x, mesh, {dt::shard(0), dt::shard(0)});   // dp and ep both cut the batch
#pragma once

#include <dtensor/parallel/expert/mix.hpp>
#include <dtensor/parallel/parallelize.hpp>

#include <torch/nn/module.h>

#include <algorithm>

#pragma GCC visibility push(default)

namespace dtensor {

namespace expert {

// A module whose parameters "w1", "w2" and maybe "w3" are expert::Weights, and that calls mix_experts with `mix`.
class Layer {
 public:
  virtual ~Layer() = default;
  MixOptions mix;
};

}  // namespace expert

struct ExpertParallelOptions {
  // The mesh dimensions that cut experts, in the order of the mesh. Any will do: over {"cp", "tp"} experts lie on the ranks that share a
  // sequence, each with tokens of its own, and what is left of the mesh (here dp) has copies of them.
  std::vector<std::string> dims = {"ep"};
  std::string hidden = "";  // the mesh dimension that cuts each expert's hidden width, as tensor parallelism does; empty: none
  std::string dispatch = "alltoall";  // or deduplicated, allgather, automatic: see MixOptions
  std::string rows = "exact", results = "exact";  // what travels: see MixOptions
  int64_t tiles = 1;                              // in how many parts
  bool put = false;                               // into the memory of other ranks
};

// Cuts the experts of all expert::Layers of `module`, which was built inside Spmd on `mesh`: as many to each rank along options.dims. All
// else stays as it is. fully_shard, before or after, cuts them further over other dimensions. Communicates nothing. Throws, before it
// changes anything, where there is no such layer, for a dimension that the mesh does not have, where ranks would have different numbers of
// experts, and for experts that are cut already.
void expert_parallel(torch::nn::Module& module, const DeviceMesh& mesh, const ExpertParallelOptions& options = {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace expert {

inline void check_law(const std::string& layer, const at::Tensor& w1, const DeviceMesh& mesh, const ExpertParallelOptions& options) {
  int64_t ranks = 1;
  std::string along;
  for (const auto& dim : options.dims) {
    ranks *= mesh.size(mesh.dim(dim));
    along += (along.empty() ? "" : " x ") + dim;
  }
  require(w1.size(0) % ranks == 0, "expert_parallel",
          "{}: experts = ranks x experts of a rank: {} experts cannot be shared alike by {} ranks; hint: the mesh needs a divisor of {} "
          "along {}", layer, w1.size(0), ranks, w1.size(0), along);
  if (!options.hidden.empty()) {
    const auto cut = mesh.size(mesh.dim(options.hidden));
    require(std::ranges::find(options.dims, options.hidden) == options.dims.end(), "expert_parallel",
            "{}: {} cannot cut both experts and their hidden width; hint: take it out of one of dims and hidden", layer, options.hidden);
    require(w1.size(1) % cut == 0, "expert_parallel", "{}: hidden = ranks x hidden of a rank: got {} and {} ranks along {}", layer,
            w1.size(1), cut, options.hidden);
  }
  const auto* layout = find_layout(w1);
  for (size_t m = 0; layout && m < layout->placements().size(); ++m) {
    require(!layout->placements()[m].is_shard(), "expert_parallel",
            "{}: the experts are cut already; got w1 {}; hint: leave them out of other plans, and call this once", layer, layout->str());
  }
}

}  // namespace expert

inline void expert_parallel(torch::nn::Module& module, const DeviceMesh& mesh, const ExpertParallelOptions& options) {
  expert::check_options({.dispatch = options.dispatch, .rows = options.rows, .results = options.results, .tiles = options.tiles,
                         .put = options.put});
  Plan plan;
  std::vector<expert::Layer*> layers;
  for (const auto& child : module.named_modules()) {
    auto* layer = dynamic_cast<expert::Layer*>(child.value().get());
    if (!layer) continue;
    const auto parameters = child.value()->named_parameters(/*recurse=*/false);
    expert::check_law(child.key(), parameters["w1"], mesh, options);
    for (const auto& parameter : parameters) {
      PlanEntry entry{child.key().empty() ? parameter.key() : child.key() + "." + parameter.key(), {}};
      for (const auto& dim : options.dims) entry.placements.emplace_back(dim, shard(0));
      if (!options.hidden.empty()) entry.placements.emplace_back(options.hidden, shard(parameter.key() == "w2" ? 2 : 1));
      plan.push_back(std::move(entry));
    }
    layers.push_back(layer);
  }
  require(!layers.empty(), "expert_parallel",
          "the module has no layer of experts; hint: dtensor::nn::MoE is one, and so is any module that derives from expert::Layer");
  parallelize_module(module, mesh, plan);
  for (auto* layer : layers) {
    layer->mix.dispatch = options.dispatch;
    layer->mix.rows = options.rows, layer->mix.results = options.results, layer->mix.tiles = options.tiles;
    layer->mix.put = options.put;
  }
}

}  // namespace dtensor

#pragma GCC visibility pop
