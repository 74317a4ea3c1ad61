// Runs a schedule: each rank does the actions of its list, one after the other.
#pragma once

#include <dtensor/parallel/pipeline/draws.hpp>
#include <dtensor/parallel/pipeline/exchange.hpp>
#include <dtensor/parallel/pipeline/given.hpp>
#include <dtensor/parallel/pipeline/lower.hpp>
#include <dtensor/parallel/pipeline/stage.hpp>
#include <dtensor/parallel/pipeline/under_way.hpp>

#include <dtensor/observe/scope.hpp>
#include <dtensor/rng/device_generator.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <exception>
#include <iterator>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// The loss of a microbatch, of one element, from the last stage's outputs.
using LossOf = std::function<at::Tensor(const TensorVector& outputs, int microbatch)>;

class Runner {
 public:
  // Every rank makes it alike, and gives the functions of all stages, of which it calls its own. `skips` are what stages feed other stages
  // than the next. Checks the schedule. Connects neighbours.
  Runner(PipelineRanks ranks, Schedule schedule, const std::vector<StageForward>& forwards, const std::vector<Skip>& skips = {},
         const Gathering& gathering = {});
  Runner(const Runner&) = delete;

  // A pass over all microbatches: forward and backward, or forward alone where gradients are off. `inputs` are the first stage's, a list
  // for each microbatch, the same on every rank (the ranks of other stages need their sizes only). Gradients are added to those of the
  // parameters; those along other mesh dimensions are reduced once, after a stage's last backward, and with `sync` false not at all.
  // Returns the losses of the microbatches on ranks that have the last stage, elsewhere nothing.
  //
  // When a stage throws, the error names stage, microbatch and action, and all ranks throw. Several ranks are out of step then: whatever
  // they call together throws from then on, and so does the next step of any pipeline.
  //
  // What else decides how much stages draw and give belongs in `mode`: whether the model is training, for one.
  TensorVector step(const std::vector<TensorVector>& inputs, const LossOf& loss, bool sync = true, const std::string& mode = "");

  const Schedule& schedule() const { return schedule_; }
  const PipelineRanks& ranks() const { return ranks_; }
  const DeviceMesh& mesh_of(int stage) const { return ranks_.meshes()[schedule_.rank_of_stage[stage]]; }
  bool has(int stage) const { return stages_.count(stage) > 0; }

 private:
  void run(const Action& action);
  size_t position_on_path(const Action& action) const;
  size_t run_unknown(const Schedule& actions);
  void forward(Stage& stage, int microbatch);
  TensorVector take_inputs(Stage& stage, int microbatch);
  void hand_outputs_on(Stage& stage, int microbatch, TensorVector outputs);
  void backward(Stage& stage, int microbatch, Kind kind);
  TensorVector take_gradients(const Stage& stage, int microbatch);
  void hand_gradients_on(Stage& stage, int microbatch, TensorVector gradients);
  void share_tied();
  Delivery take(const Message& message);
  void give(const Message& message, Delivery delivery);
  TensorVector run_all(const Schedule& actions);
  const std::vector<Sent>* sent(const Message& message) const;
  bool last(const Stage& stage) const { return stage.index + 1 == schedule_.stages(); }

  const PipelineRanks ranks_;
  Schedule schedule_;
  Exchange exchange_;
  StageDraws draws_;
  int whole_stages_;
  std::map<int, Stage> stages_;
  int64_t steps_ = 0;

  // Of the step.
  const std::vector<TensorVector>* inputs_ = nullptr;
  const LossOf* loss_ = nullptr;
  std::vector<Signature> signatures_;
  TensorVector losses_;
  bool sync_ = true;
  bool between_stages_ = false;  // something is given or taken, or that failed
};

// -- How -----------------------------------------------------------------------------------------------------------------

inline Runner::Runner(PipelineRanks ranks, Schedule schedule, const std::vector<StageForward>& forwards, const std::vector<Skip>& skips,
                      const Gathering& gathering)
    : ranks_(std::move(ranks)),
      schedule_(detail::checked(std::move(schedule), ranks_.size(), forwards.size(), skips)),
      exchange_(schedule_, ways_of(schedule_, skips), ranks_.meshes(), ranks_.own()),
      draws_(ranks_),
      whole_stages_(gathering.stages) {
  require(whole_stages_ >= 0, "pipeline", "got {} stages to be whole at once; expected 0 or more", whole_stages_);
  auto ways = ways_of(schedule_, skips);
  std::ranges::sort(ways, {}, [](const Way& way) { return std::abs(way.to - way.from); });
  for (int s = 0; s < schedule_.stages(); ++s) {
    if (schedule_.rank_of_stage[s] != ranks_.own()) continue;
    auto& stage = stages_.emplace(s, Stage{s, mesh_of(s), forwards[s]}).first->second;
    if (!gathering.parameters.empty()) stage.parameters = gathering.parameters.at(s);
    std::ranges::copy_if(ways, std::back_inserter(stage.into), [&](const Way& way) { return way.to == s; });
    std::ranges::copy_if(ways, std::back_inserter(stage.out), [&](const Way& way) { return way.from == s; });
  }
}

inline Delivery Runner::take(const Message& message) {
  between_stages_ = true;
  auto delivery = exchange_.take(message);
  between_stages_ = false;
  return delivery;
}

inline void Runner::give(const Message& message, Delivery delivery) {
  between_stages_ = true;
  exchange_.give(message, std::move(delivery));
  between_stages_ = false;
}

// How the gradients of a stage's outputs come: as these went.
inline const std::vector<Sent>* Runner::sent(const Message& message) const {
  const auto& stage = stages_.at(message.from);
  const auto found = stage.kept.find(message.microbatch);
  if (found == stage.kept.end() || found->second.sent.empty()) return nullptr;
  const auto way = std::ranges::find(found->second.out, message.to, &Way::to);
  return &found->second.sent[way - found->second.out.begin()];
}

// The values of tied parameters, from the stages that own them to the others.
inline void Runner::share_tied() {
  const at::NoGradGuard no_grad;
  for (const bool sends : {true, false}) {
    for (auto& [index, stage] : stages_) {
      for (const auto& way : sends ? stage.out : stage.into) {
        if (way.tied.empty() || has(sends ? way.to : way.from)) continue;
        const Message message{Kind::F, way.from, way.to, kBeforeAll};
        if (sends) {
          give(message, {way.tied, detail::sent_to(mesh_of(way.to), way.tied)});
        } else {
          const auto values = take(message).tensors;
          for (size_t i = 0; i < values.size(); ++i) way.tied[i].detach().copy_(values[i]);
        }
      }
    }
  }
}

// The values that the stage's function takes. The stage keeps the leaves.
inline TensorVector Runner::take_inputs(Stage& stage, int microbatch) {
  auto& kept = stage.kept[microbatch];
  for (const auto& way : stage.into) {
    if (goes_along(way, schedule_, microbatch)) kept.into.push_back(&way);
  }
  for (const auto& way : stage.out) {
    if (goes_along(way, schedule_, microbatch)) kept.out.push_back(&way);
  }
  if (stage.index == 0) {
    for (const auto& x : (*inputs_)[microbatch]) kept.inputs.push_back(detail::on_mesh(x.detach(), stage.mesh));
    return kept.inputs;
  }
  TensorVector values;
  for (const auto* along : kept.into) {
    const auto& way = *along;
    auto& received = kept.received.emplace_back();
    if (!way.carries_nothing()) {
      auto [tensors, how] = take({Kind::F, way.from, way.to, microbatch});
      received = std::move(how);
      for (size_t i = 0; i < tensors.size(); ++i) values.push_back(tensors[i].detach().requires_grad_(received[i].tracked));
      kept.inputs.insert(kept.inputs.end(), values.end() - tensors.size(), values.end());
    }
    for (const auto& parameter : way.tied) {
      received.push_back(detail::reversed(detail::way_of(parameter, mesh_of(way.from))));
      kept.inputs.push_back(parameter);
    }
  }
  return values;
}

inline void Runner::hand_outputs_on(Stage& stage, int microbatch, TensorVector outputs) {
  auto& kept = stage.kept[microbatch];
  size_t skips = 0, next = 0;
  for (const auto* way : kept.out) skips += way->skips;
  require(outputs.size() >= skips, "pipeline", "the stage gives {} tensors; expected at least the {} that skip stages", outputs.size(),
          skips);
  TensorVector tracked;  // those of the farthest stage first: one device would add their gradients up in this order
  const auto track = [&](const at::Tensor& tensor) {
    if (tensor.requires_grad() && c10::GradMode::is_enabled()) tracked.push_back(tensor);
  };
  std::vector<TensorVector> values;
  for (const auto* way : kept.out) {
    auto& own = values.emplace_back();
    const auto end = next + way->skips + (way->to_next ? outputs.size() - skips : 0);
    for (; next < end; ++next) own.push_back(detail::on_mesh(outputs[next], stage.mesh));
    kept.sent.push_back(detail::sent_to(mesh_of(way->to), own));
  }
  for (size_t w = values.size(); w-- > 0;) {
    std::ranges::for_each(values[w], track);
    std::ranges::for_each(kept.out[w]->tied, track);
  }
  if (!tracked.empty()) kept.outputs.emplace(tracked);
  outputs.clear();
  tracked.clear();
  for (size_t w = 0; w < values.size(); ++w) {
    const auto& way = *kept.out[w];
    for (auto& value : values[w]) value = value.detach();
    if (!way.carries_nothing()) give({Kind::F, way.from, way.to, microbatch}, {std::move(values[w]), kept.sent[w]});
    const auto tied = detail::sent_to(mesh_of(way.to), way.tied);
    kept.sent[w].insert(kept.sent[w].end(), tied.begin(), tied.end());
  }
}

inline void Runner::forward(Stage& stage, int microbatch) {
  const auto inputs = take_inputs(stage, microbatch);
  auto& kept = stage.kept[microbatch];
  const Spmd spmd(stage.mesh);
  auto outputs = stage.forward(inputs);
  if (!last(stage)) {
    hand_outputs_on(stage, microbatch, std::move(outputs));
  } else {
    const auto loss = (*loss_)(outputs, microbatch);
    detail::check_loss(loss);
    losses_[microbatch] = loss.detach();
    if (loss.requires_grad()) kept.outputs.emplace(TensorVector{loss});
  }
  if (!c10::GradMode::is_enabled()) stage.kept.erase(microbatch);
}

// Those of the outputs that need one, as `outputs` of KeptForward has them.
inline TensorVector Runner::take_gradients(const Stage& stage, int microbatch) {
  const auto& kept = stage.kept.at(microbatch);
  if (last(stage)) return TensorVector(kept.outputs ? 1 : 0);
  TensorVector gradients;
  for (size_t w = kept.out.size(); w-- > 0;) {
    const auto came = take({Kind::B, stage.index, kept.out[w]->to, microbatch}).tensors;
    for (size_t i = 0; i < came.size(); ++i) {
      if (kept.sent[w][i].tracked) gradients.push_back(came[i]);
    }
  }
  return gradients;
}

inline void Runner::hand_gradients_on(Stage& stage, int microbatch, TensorVector gradients) {
  const auto& kept = stage.kept.at(microbatch);
  size_t next = 0;
  for (size_t w = 0; w < kept.into.size(); ++w) {
    const Message message{Kind::B, kept.into[w]->from, stage.index, microbatch};
    const auto* before = exchange_.gradients_before(message);
    TensorVector own;
    for (size_t i = 0; i < kept.received[w].size(); ++i, ++next) {
      // A gradient that there is not stays so, as on one device. Where the other stage waits for one, zeros add nothing.
      if (before && (*before)[i] && !gradients[next].defined()) gradients[next] = at::zeros_like(kept.inputs[next]);
      own.push_back(std::move(gradients[next]));
    }
    give(message, {std::move(own), kept.received[w]});
  }
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
  auto gradients = take_gradients(stage, microbatch);
  TensorVector of_inputs(kept.inputs.size());
  if (kept.outputs && !last(stage) && kept.outputs->leave_out_missing(gradients) == 0) kept.outputs.reset();
  if (kept.outputs) {
    const bool tied = std::ranges::any_of(kept.into, [](const Way* way) { return !way->tied.empty(); });
    if (kind == Kind::I || tied) {  // the gradient of a tied parameter belongs to its owner: it is one of an input
      auto half = std::move(*kept.outputs).backward_inputs(gradients, kept.inputs);
      of_inputs = std::move(half.gradients);
      kept.weights = std::move(half.weights);
    } else {
      std::move(*kept.outputs).backward(gradients);
      for (size_t i = 0; i < of_inputs.size(); ++i) of_inputs[i] = kept.inputs[i].grad();
    }
  }
  hand_gradients_on(stage, microbatch, std::move(of_inputs));
  kept.inputs.clear();
  kept.outputs.reset();
  if (kind == Kind::I) return;
  kept.weights.run();
  stage.kept.erase(microbatch);
}

inline size_t Runner::position_on_path(const Action& action) const {
  if (schedule_.paths.empty()) return action.stage;
  const auto& path = schedule_.paths[action.microbatch];
  return std::ranges::find(path, action.stage) - path.begin();
}

inline void Runner::run(const Action& action) {
  auto& stage = stages_.at(action.stage);
  try {
    const Scope scope(text(action));
    const BatchRows rows(rows_of_batch(*inputs_, action.microbatch));
    if (!is_compute(action.kind)) return stage.keep_whole(action.kind == Kind::UNSHARD);
    if (action.kind != Kind::F) return backward(stage, action.microbatch, action.kind);
    draws_.go_to(position_on_path(action), action.microbatch);
    forward(stage, action.microbatch);
    draws_.check(position_on_path(action), action.microbatch);
  } catch (...) {
    const auto why = dtensor::detail::text_of(std::current_exception());
    if (between_stages_) {
      fail("pipeline", "step {} ends at {} (microbatch {}) of stage {}, which cannot get or give what others have or need: {}", steps_,
           text(action), action.microbatch, action.stage, why);
    }
    fail("pipeline", "stage {} failed at {} (microbatch {}) in step {}: {}", action.stage, text(action), action.microbatch, steps_, why);
  }
}

// The forwards of microbatches from which something is learned, in step with the other ranks. How many were this rank's.
inline size_t Runner::run_unknown(const Schedule& actions) {
  size_t own = 0;
  for (const int microbatch : draws_.unknown()) {
    const auto path = actions.path(microbatch);
    for (size_t i = 0; i < path.size(); ++i) {
      own += has(path[i]);
      draws_.learn(microbatch, i, actions.rank_of_stage[path[i]], [&] { run({path[i], Kind::F, microbatch}); });
    }
  }
  return own;
}

inline TensorVector Runner::step(const std::vector<TensorVector>& inputs, const LossOf& loss, bool sync, const std::string& mode) {
  require(static_cast<int>(inputs.size()) == schedule_.microbatches, "pipeline", "got {} microbatches; expected the schedule's {}",
          inputs.size(), schedule_.microbatches);
  if (ranks_.size() > 1) FailedStep::refuse_later();
  const StepUnderWay under_way;
  between_stages_ = false;
  inputs_ = &inputs;
  loss_ = &loss;
  sync_ = sync;
  losses_.assign(has(schedule_.stages() - 1) ? inputs.size() : 0, at::Tensor());
  signatures_.clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    signatures_.push_back(mode + detail::signature_of(inputs[i]));
    if (!schedule_.paths.empty()) signatures_.back() += fmt::format(" {}", fmt::join(schedule_.paths[i], ">"));
  }
  for (auto& [index, stage] : stages_) {
    stage.keep_whole(false);  // a step before may have failed
    stage.kept.clear();
    stage.backwards = 0;
    for (int i = 0; i < schedule_.microbatches; ++i) stage.backwards += schedule_.passes(index, i);
  }
  draws_.begin(signatures_, rng::generator_for(World::current(), c10::Device(ranks_.meshes()[ranks_.own()].device_type())));
  const auto training = compute_only(schedule_);
  const auto actions = with_first(c10::GradMode::is_enabled() ? training : forward_only(training), draws_.unknown());
  try {
    return run_all(actions);
  } catch (...) {
    if (ranks_.size() > 1) FailedStep::tell();
    throw;
  }
}

inline TensorVector Runner::run_all(const Schedule& actions) {
  exchange_.begin(actions, signatures_, [this](const Message& message) { return sent(message); });
  share_tied();
  const auto done = run_unknown(actions);
  std::vector<Action> own(actions.ranks[ranks_.own()].begin() + static_cast<std::ptrdiff_t>(done), actions.ranks[ranks_.own()].end());
  if (whole_stages_ > 0) own = detail::with_gathering(own, std::min(whole_stages_, static_cast<int>(stages_.size())));
  for (const auto& action : own) {
    for (const auto& part : Parts(action)) run(part);
  }
  draws_.end();
  exchange_.finish();
  ++steps_;
  return std::move(losses_);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
