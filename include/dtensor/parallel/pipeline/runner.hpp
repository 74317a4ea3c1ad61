// Runs a schedule: each rank does the actions of its list, one after the other.
#pragma once

#include <dtensor/parallel/pipeline/check.hpp>
#include <dtensor/parallel/pipeline/draws.hpp>
#include <dtensor/parallel/pipeline/mail.hpp>
#include <dtensor/parallel/pipeline/stage.hpp>

#include <dtensor/observe/scope.hpp>
#include <dtensor/rng/device_generator.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <exception>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// The loss of a microbatch, of one element, from the last stage's outputs.
using LossOf = std::function<at::Tensor(const TensorVector& outputs, int microbatch)>;

class Runner {
 public:
  // The ranks whose coordinate along `dim` is r have the stages of the schedule's rank r. Every rank of `mesh` makes it alike, and gives
  // the functions of all stages, of which it calls its own. Checks the schedule. Connects neighbours.
  Runner(const DeviceMesh& mesh, std::string_view dim, Schedule schedule, const std::vector<StageForward>& forwards);

  // A pass over all microbatches: forward and backward, or forward alone where gradients are off. `inputs` are the first stage's, a list
  // for each microbatch, the same on every rank (the ranks of other stages need their sizes only). Gradients are added to those of the
  // parameters; those along other mesh dimensions are reduced once, after a stage's last backward, and with `sync` false not at all.
  // Returns the losses of the microbatches on ranks that have the last stage, elsewhere nothing.
  //
  // When a stage throws, the error names stage, microbatch and action, and all ranks throw.
  //
  // What else decides how much stages draw and give belongs in `mode`: whether the model is training, for one.
  TensorVector step(const std::vector<TensorVector>& inputs, const LossOf& loss, bool sync = true, const std::string& mode = "");

  const Schedule& schedule() const { return schedule_; }
  const DeviceMesh& mesh_of(int stage) const { return meshes_[schedule_.rank_of_stage[stage]]; }
  bool has(int stage) const { return stages_.count(stage) > 0; }

 private:
  void run(const Action& action);
  size_t run_unknown(const Schedule& actions);
  void forward(Stage& stage, int microbatch);
  void backward(Stage& stage, int microbatch, Kind kind);
  void hand_on(const Letter& letter, TensorVector tensors, const std::vector<Sent>& sent);
  std::pair<TensorVector, std::vector<Sent>> take(const Letter& letter);
  const std::vector<Sent>* known(const Letter& letter);
  bool last(const Stage& stage) const { return stage.index + 1 == schedule_.stages(); }

  std::vector<DeviceMesh> meshes_;  // of the schedule's ranks
  Schedule schedule_;
  int rank_;
  Mail mail_;
  StageDraws draws_;
  std::map<int, Stage> stages_;
  std::map<std::pair<int, Signature>, std::vector<Sent>> ways_;           // to a stage, for microbatches of these sizes
  std::map<Letter, std::pair<TensorVector, std::vector<Sent>>> at_hand_;  // between two stages of this rank
  int64_t steps_ = 0;

  // Of the step.
  const std::vector<TensorVector>* inputs_ = nullptr;
  const LossOf* loss_ = nullptr;
  std::vector<Signature> signatures_;
  TensorVector losses_;
  bool sync_ = true;
};

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline std::vector<DeviceMesh> slices(const DeviceMesh& mesh, std::string_view dim) {
  std::vector<DeviceMesh> result;
  for (int64_t i = 0; i < mesh.size(mesh.dim(dim)); ++i) result.push_back(mesh.slice(dim, i));
  return result;
}

// What the sizes of everything between stages hang on.
inline std::string signature_of(const TensorVector& inputs) {
  std::string text = c10::GradMode::is_enabled() ? "g" : "n";
  for (const auto& x : inputs) {
    const auto* layout = find_layout(x);
    text += layout ? fmt::format(" {}{}", c10::toString(layout->dtype()), str(layout->placements())) : c10::toString(x.scalar_type());
    for (const auto size : x.sizes()) text += fmt::format(",{}", size);
  }
  return text;
}

inline bool same_way(const std::vector<Sent>& a, const std::vector<Sent>& b) {
  return std::ranges::equal(a, b, [](const Sent& x, const Sent& y) {
    return x.before == y.before && x.after == y.after && x.order == y.order && x.tracked == y.tracked;
  });
}

inline at::Tensor on_mesh(const at::Tensor& tensor, const DeviceMesh& mesh) {
  return is_dtensor(tensor) ? tensor : distribute_tensor(tensor, mesh, Placements(mesh.ndim(), replicate())).tensor();
}

// That a schedule may run on so many ranks, with so many functions.
inline Schedule checked(Schedule schedule, std::string_view dim, size_t ranks, size_t forwards) {
  check(schedule);
  require(schedule.ranks.size() == ranks, "pipeline", "the schedule is for {} ranks, and the mesh dimension '{}' has {}",
          schedule.ranks.size(), dim, ranks);
  require(static_cast<int>(forwards) == schedule.stages(), "pipeline", "got {} stages; expected the schedule's {}", forwards,
          schedule.stages());
  return schedule;
}

inline void check_loss(const at::Tensor& loss) {
  require(loss.defined() && loss.numel() == 1, "pipeline", "the loss has sizes [{}]; expected one element; hint: sum() or mean() it",
          loss.defined() ? fmt::format("{}", fmt::join(loss.sizes(), ", ")) : "");
  require(loss.requires_grad() || !c10::GradMode::is_enabled(), "pipeline",
          "the loss needs no gradient; hint: it must come from the last stage's outputs and parameters; evaluate() needs no gradients");
}

}  // namespace detail

inline Runner::Runner(const DeviceMesh& mesh, std::string_view dim, Schedule schedule, const std::vector<StageForward>& forwards)
    : meshes_(detail::slices(mesh, dim)),
      schedule_(detail::checked(std::move(schedule), dim, meshes_.size(), forwards.size())),
      rank_(static_cast<int>(mesh.coordinate(mesh.dim(dim)))),
      mail_(schedule_, meshes_, rank_),
      draws_(mesh.communicator(mesh.dim(dim))) {
  for (int s = 0; s < schedule_.stages(); ++s) {
    if (schedule_.rank_of_stage[s] == rank_) stages_.emplace(s, Stage{s, meshes_[rank_], forwards[s]});
  }
}

inline const std::vector<Sent>* Runner::known(const Letter& letter) {
  if (letter.kind == Kind::F) {
    const auto found = ways_.find({letter.stage, signatures_[letter.microbatch]});
    return found == ways_.end() ? nullptr : &found->second;
  }
  const auto& kept = stages_.at(letter.stage).kept;
  const auto found = kept.find(letter.microbatch);
  return found == kept.end() || found->second.sent.empty() ? nullptr : &found->second.sent;
}

inline void Runner::hand_on(const Letter& letter, TensorVector tensors, const std::vector<Sent>& sent) {
  if (has(letter.stage)) {
    at_hand_[letter] = {std::move(tensors), sent};
    return;
  }
  bool introduce = false;
  if (letter.kind == Kind::F) {
    const auto [way, is_new] = ways_.try_emplace({letter.stage, signatures_[letter.microbatch]}, sent);
    introduce = is_new;
    require(is_new || detail::same_way(way->second, sent), "pipeline",
            "the outputs of stage {} have other sizes or layouts than those of a microbatch of equal inputs had", letter.stage - 1);
  }
  mail_.send(letter, tensors, sent, introduce);
}

inline std::pair<TensorVector, std::vector<Sent>> Runner::take(const Letter& letter) {
  if (const auto found = at_hand_.find(letter); found != at_hand_.end()) {
    auto result = std::move(found->second);
    at_hand_.erase(found);
    return result;
  }
  auto result = mail_.take(letter);
  if (letter.kind == Kind::F) ways_.try_emplace({letter.stage, signatures_[letter.microbatch]}, result.second);
  return result;
}

inline void Runner::forward(Stage& stage, int microbatch) {
  auto& kept = stage.kept[microbatch];
  if (stage.index == 0) {
    for (const auto& x : (*inputs_)[microbatch]) kept.inputs.push_back(detail::on_mesh(x.detach(), stage.mesh));
  } else {
    auto [tensors, received] = take({Kind::F, stage.index, microbatch});
    for (size_t i = 0; i < tensors.size(); ++i) kept.inputs.push_back(tensors[i].detach().requires_grad_(received[i].tracked));
    kept.received = std::move(received);
  }
  const Spmd spmd(stage.mesh);
  auto outputs = stage.forward(kept.inputs);
  if (last(stage)) {
    outputs = {(*loss_)(outputs, microbatch)};
    detail::check_loss(outputs[0]);
    losses_[microbatch] = outputs[0].detach();
  }
  TensorVector tracked;
  for (const auto& output : outputs) {
    if (output.requires_grad()) tracked.push_back(output);
  }
  if (!tracked.empty()) kept.outputs.emplace(tracked);
  if (!last(stage)) {
    const auto& next = mesh_of(stage.index + 1);
    for (auto& output : outputs) {
      kept.sent.push_back(detail::way_of(output = detail::on_mesh(output, stage.mesh), next));
      output = output.detach();
    }
    hand_on({Kind::F, stage.index + 1, microbatch}, std::move(outputs), kept.sent);
  }
  if (!c10::GradMode::is_enabled()) stage.kept.erase(microbatch);
}

inline void Runner::backward(Stage& stage, int microbatch, Kind kind) {
  auto& kept = stage.kept.at(microbatch);
  std::optional<NoSync> no_sync;
  const bool ends = kind != Kind::I && --stage.backwards == 0;  // the last of the stage: gradients are whole
  if (!ends || !sync_) no_sync.emplace();
  const Spmd spmd(stage.mesh);
  if (kind == Kind::W) {
    kept.weights.run();
    stage.kept.erase(microbatch);
    return;
  }
  TensorVector gradients;
  if (last(stage)) {
    gradients.resize(kept.outputs ? 1 : 0);
  } else {
    const auto came = take({Kind::B, stage.index, microbatch}).first;
    for (size_t i = 0; i < came.size(); ++i) {
      if (kept.sent[i].tracked) gradients.push_back(came[i]);
    }
  }
  TensorVector of_inputs(kept.inputs.size());
  if (kept.outputs) {
    if (kind == Kind::I) {
      auto half = std::move(*kept.outputs).backward_inputs(gradients, kept.inputs);
      of_inputs = std::move(half.gradients);
      kept.weights = std::move(half.weights);
    } else {
      std::move(*kept.outputs).backward(gradients);
      for (size_t i = 0; i < of_inputs.size(); ++i) of_inputs[i] = kept.inputs[i].grad();
    }
  }
  for (size_t i = 0; i < kept.received.size(); ++i) {
    if (kept.received[i].tracked && !of_inputs[i].defined()) of_inputs[i] = at::zeros_like(kept.inputs[i]);
  }
  if (stage.index > 0) hand_on({Kind::B, stage.index - 1, microbatch}, std::move(of_inputs), kept.received);
  kept.inputs.clear();
  kept.outputs.reset();
  if (kind == Kind::B) stage.kept.erase(microbatch);
}

inline void Runner::run(const Action& action) {
  auto& stage = stages_.at(action.stage);
  try {
    const Scope scope(text(action));
    if (action.kind == Kind::F) draws_.go_to(action.stage, action.microbatch);
    action.kind == Kind::F ? forward(stage, action.microbatch) : backward(stage, action.microbatch, action.kind);
  } catch (const c10::Error& error) {
    fail("pipeline", "stage {} failed at {} (microbatch {}) in step {}: {}", action.stage, text(action), action.microbatch, steps_,
         error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail("pipeline", "stage {} failed at {} (microbatch {}) in step {}: {}", action.stage, text(action), action.microbatch, steps_,
         error.what());
  }
}

// The forwards of microbatches from which something is learned, in step with the other ranks. How many were this rank's.
inline size_t Runner::run_unknown(const Schedule& actions) {
  size_t own = 0;
  for (const int microbatch : draws_.unknown()) {
    for (int s = 0; s < actions.stages(); ++s) {
      own += has(s);
      draws_.learn(microbatch, s, actions.rank_of_stage[s], [&] { run({s, Kind::F, microbatch}); });
    }
  }
  return own;
}

inline TensorVector Runner::step(const std::vector<TensorVector>& inputs, const LossOf& loss, bool sync, const std::string& mode) {
  require(static_cast<int>(inputs.size()) == schedule_.microbatches, "pipeline", "got {} microbatches; expected the schedule's {}",
          inputs.size(), schedule_.microbatches);
  inputs_ = &inputs;
  loss_ = &loss;
  sync_ = sync;
  at_hand_.clear();  // of a step that failed
  losses_.assign(has(schedule_.stages() - 1) ? inputs.size() : 0, at::Tensor());
  signatures_.clear();
  for (const auto& x : inputs) signatures_.push_back(mode + detail::signature_of(x));
  for (auto& [index, stage] : stages_) {
    stage.kept.clear();
    stage.backwards = schedule_.microbatches;
  }
  draws_.begin(signatures_, rng::generator_for(World::current(), c10::Device(meshes_[rank_].device_type())));
  const auto training = compute_only(schedule_);
  const auto actions = with_first(c10::GradMode::is_enabled() ? training : forward_only(training), draws_.unknown());
  mail_.begin(actions, [this](const Letter& letter) { return known(letter); });
  const auto done = run_unknown(actions);
  for (size_t i = done; i < actions.ranks[rank_].size(); ++i) {
    for (const auto& part : Parts(actions.ranks[rank_][i])) run(part);
  }
  draws_.end();
  mail_.finish();
  ++steps_;
  return std::move(losses_);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
