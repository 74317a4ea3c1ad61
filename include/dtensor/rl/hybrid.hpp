// One actor in two layouts: it trains in one and generates in another, on the same ranks or on others.
//
//   const auto layout = rl::generation_mesh(training, 2);                         // tp=4 trains, dp=2 x tp=2 generates
//   rl::WorkerGroup rollout("rollout", layout, [&] { return model = std::make_shared<Llama>(options); }, plan);
//   rl::HybridEngine hybrid(*trained, rollout, *model);
//   optimizer.step();
//   hybrid.update(step);                                                          // each rank gets what it lacks
//   auto answers = rollout.run({.name = "generate", .gives = {"answers"}}, batch.select({"prompts"}), [&](const rl::Batch& mine) {
//     ... hybrid.engine().generate(prompts, settings) ...
//   });
#pragma once

#include <dtensor/generate/engine.hpp>
#include <dtensor/rl/groups.hpp>
#include <dtensor/rl/weight_sync.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// A mesh {"dp", "tp"} of the same ranks, with `tensor_parallel` ranks along "tp", for generation. Ranks are ordered so that what a rank has
// of a tensor that `dim` of `training` cuts lies within what it gets: then it receives (t p - tg) / (tg t p) of the model's bytes, where t
// and p are the sizes of "tp" and "pp" in training and tg is tensor_parallel (HybridFlow, Sheng et al., 2024, with pg = 1), and nothing
// twice. Throws unless `tensor_parallel` divides the size of `dim`.
DeviceMesh generation_mesh(const DeviceMesh& training, int64_t tensor_parallel, const std::string& dim = "tp");

struct HybridOptions {
  generate::EngineOptions engine{};
  WeightSyncOptions sync{};
};

// All ranks of the trained module's meshes and of the rollout group make it, and call update().
template <class Model>
class HybridEngine {
 public:
  // `trained` is the actor as it trains: a module, or the named weights of several. `model` is the rollout group's module, whose parameters
  // have the same names. All outlive it.
  HybridEngine(generate::NamedWeights trained, WorkerGroup& rollout, Model& model, const HybridOptions& options = {})
      : rollout_(&rollout), sync_(std::move(trained), model, options.sync), weights_(detail::tensors_of(&model, nullptr)) {
    sync_.run();
    if (!rollout.mesh().contains_this_rank()) return;
    const Spmd spmd(rollout.mesh());
    engine_ = std::make_unique<generate::Engine>(model, options.engine);
  }
  HybridEngine(const torch::nn::Module& trained, WorkerGroup& rollout, Model& model, const HybridOptions& options = {})
      : HybridEngine(generate::named_weights(trained), rollout, model, options) {}

  // Brings the trained weights to the rollout group, of which outputs say that they are `version`. What the engine has cached is forgotten.
  SyncCounts update(int64_t version) {
    rollout_->restore();
    memory_.restore();
    const auto counts = sync_.run();
    if (engine_) engine_->load_weights(version);
    return counts;
  }

  // Frees the memory of the rollout group's weights while others need it, until update() brings all of them anew: then a rank that trains
  // and generates never holds more than what it trains and its part for generation. Nothing may use them in between.
  void release() {
    sync_.forget();
    memory_.put_away(weights_, /*keep=*/false);
  }

  // Throws on ranks that do not generate.
  generate::Engine& engine() {
    require(engine_ != nullptr, "rl::HybridEngine", "this rank does not generate; those of {} do", rollout_->mesh().str());
    return *engine_;
  }

 private:
  WorkerGroup* rollout_;
  WeightSync sync_;
  std::vector<at::Tensor> weights_;
  OffloadedStorages memory_;
  std::unique_ptr<generate::Engine> engine_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline DeviceMesh generation_mesh(const DeviceMesh& training, int64_t tensor_parallel, const std::string& dim) {
  const auto along = training.dim(dim), size = training.size(along);
  require(tensor_parallel >= 1 && size % tensor_parallel == 0, "rl::generation_mesh",
          "got {} for ranks along tp; expected a divisor of {}, the size of '{}' in {}", tensor_parallel, size, dim, training.str());
  const auto neighbours = size / tensor_parallel;  // whose shards make up one
  std::vector<std::vector<int>> by_place(tensor_parallel);
  for (int64_t i = 0; i < training.size(); ++i) by_place[training.coordinate_of(i)[along] / neighbours].push_back(training.ranks()[i]);
  std::vector<int> ranks;
  for (size_t d = 0; d < by_place[0].size(); ++d) {
    for (const auto& place : by_place) ranks.push_back(place[d]);
  }
  const auto groups = static_cast<int64_t>(by_place[0].size());
  return DeviceMesh(training.device_type(), std::move(ranks), {groups, tensor_parallel}, {"dp", "tp"});
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
