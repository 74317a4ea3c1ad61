// Pipeline parallelism: a model that is cut into stages, which the ranks along a mesh dimension hold and microbatches pass through.
//
//   auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"});
//   auto own = dt::stage_mesh(mesh, "pp");                                  // this rank's, without "pp"
//   auto model = [&] { dt::DeferredInit deferred(own); return std::make_shared<Gpt>(options); }();
//   auto pipe = dt::pipeline(*model, mesh, model->pieces(), {.schedule = "zbv", .microbatches = 8});
//   pipe.materialize();                                                     // the parameters of this rank's stages, and no others
//   torch::optim::AdamW optimizer(pipe.parameters(), 1e-3);
//
//   auto result = pipe.step(ids, targets, [](auto& y, auto& target) { return loss(y, target) / 8; });
//   pipe.clip_grad_norm_(1.0);
//   optimizer.step();
//
// Losses, gradients and random numbers are those of one device that goes through the microbatches in order and adds their gradients up.
#pragma once

#include <dtensor/parallel/pipeline/alike.hpp>
#include <dtensor/parallel/pipeline/batch.hpp>
#include <dtensor/parallel/pipeline/cut.hpp>
#include <dtensor/parallel/pipeline/loss.hpp>
#include <dtensor/parallel/pipeline/named.hpp>
#include <dtensor/parallel/pipeline/pieces.hpp>
#include <dtensor/parallel/pipeline/runner.hpp>

#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/training/clip.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <limits>
#include <numeric>

#pragma GCC visibility push(default)

namespace dtensor {

// The mesh of the stages that this rank has: `mesh` without the dimension `dim`, or that of `meshes` which this rank is in.
inline DeviceMesh stage_mesh(const DeviceMesh& mesh, std::string_view dim = "pp") {
  return mesh.slice(dim, mesh.coordinate(mesh.dim(dim)));
}
inline DeviceMesh stage_mesh(const std::vector<DeviceMesh>& meshes) { return meshes[pipelining::own_mesh(meshes)]; }

struct PipelineOptions {
  std::string dim = "pp";         // the dimension of a mesh whose ranks hold the stages
  std::string schedule = "1f1b";  // see docs/pipeline_schedules.md
  int microbatches = 0;           // 0: twice as many as ranks
  int chunks = 0;                 // stages of a rank; 0: what the schedule has
  // A schedule of your own, in place of a name.
  std::function<pipelining::Schedule(const pipelining::PipelineSize& sizes)> make_schedule = {};
  // How many pieces each stage has. Empty: stages are balanced by the costs.
  std::vector<int> cut = {};
  // Of fully sharded parameters: so many stages of a rank are whole at once, gathered when the schedule comes to them. 0: units are
  // gathered whenever they are used, for each microbatch anew, and as many are whole as fully_shard was told.
  int whole_stages = 3;
  // Of each piece: those that Pipeline::measured_costs() gave, for example. Empty: the number of elements of its parameters, and one.
  std::vector<double> costs = {};
};

struct PipelineStep {
  std::vector<double> losses;  // of the microbatches, on every rank; NaN in a dry run
  double loss = 0;             // their sum, in order
};

class Pipeline {
 public:
  using Loss = PipelineLoss;
  using Tensors = std::vector<at::Tensor>;

  // See dt::pipeline().
  Pipeline(torch::nn::Module& module, pipelining::PipelineRanks ranks, const std::vector<Piece>& pieces, const PipelineOptions& options);

  // Forward and backward of all microbatches: `input` and `target` are cut along dim 0 into as many, of lengths that differ by one at most.
  // Both are the same on every rank of the pipeline, plain (then every rank of a stage has it whole) or on stage_mesh(). `loss` gives a
  // microbatch's loss, of one element, from the output of the last piece; divide there if you want a mean. Gradients are added to those of
  // parameters(); along other mesh dimensions they are reduced once, and with `sync` false not yet.
  //
  // Communicates what the stages tell each other and, at the end, the losses. Throws on every rank if a stage throws (naming stage,
  // microbatch, action and step), and for a batch of fewer rows than microbatches. After a stage threw, all that the job's ranks call
  // together throws too, and so does every later step, unless the pipeline has one rank: a program that catches the error can only end.
  PipelineStep step(const at::Tensor& input, const at::Tensor& target, const Loss& loss, bool sync = true);

  // The same with microbatches that are cut already: shard each over a data dimension of stage_mesh().
  PipelineStep step(const Tensors& inputs, const Tensors& targets, const Loss& loss, bool sync = true);

  // The same without gradients.
  PipelineStep evaluate(const at::Tensor& input, const at::Tensor& target, const Loss& loss);
  PipelineStep evaluate(const Tensors& inputs, const Tensors& targets, const Loss& loss);

  // Of this rank's stages, with the names that they have in the whole model.
  Tensors parameters() const;
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const { return own_; }
  // The same, and the buffers that no piece names. A rank has a buffer of its own even where stages of other ranks use one of that name.
  std::vector<std::pair<std::string, at::Tensor>> named_buffers() const {
    return pipelining::buffers_of(*module_, patterns_, all_patterns_);
  }

  // The modules of this rank's stages, none inside another: what fully_shard() shards before materialize().
  std::vector<torch::nn::Module*> modules() const;

  // Gives the parameters and buffers of this rank's stages their values, those of one device (see dt::DeferredInit). The others stay
  // without memory.
  void materialize() const;
  // The same without values, for a dry run (see dt::forget_values).
  void forget_values() const;

  // As dt::grad_norm and dt::clip_grad_norm_, over all stages: the value of one device, added up in the order of the whole model's
  // parameters. Every rank calls it. Communicates 8 bytes for each parameter.
  double grad_norm(double norm_type = 2) const;
  double clip_grad_norm_(double max_norm, double norm_type = 2) const;

  // f(parameter), whole, for every parameter of the model in its order, on every rank: for files and comparisons. `f` is called on the
  // ranks that have the parameter; where it gives an undefined tensor, so does this. Communicates each of them.
  Tensors gather(const std::function<at::Tensor(const at::Tensor& parameter)>& f) const;

  // What each piece of the model costs, for PipelineOptions::costs of a pipeline that balances its stages by time: milliseconds of the
  // fastest forward so far, the same on every rank. (A backward pass takes about twice as long, of all pieces.) Every rank of the mesh
  // calls it, after a step. Communicates 8 bytes for each piece. On a GPU these are the times to issue the piece. Throws in a dry run and
  // before the first step.
  std::vector<double> measured_costs() const;

  const pipelining::Schedule& schedule() const { return runner_->schedule(); }
  const pipelining::PipelineRanks& ranks() const { return runner_->ranks(); }
  int microbatches() const { return schedule().microbatches; }
  const std::vector<int>& cut() const { return cut_; }  // pieces of each stage

 private:
  PipelineStep run(const Tensors& inputs, const Tensors& targets, const Loss& loss, bool sync);
  std::string mode() const;
  void compare_with_others();
  Tensors held() const;  // parameters(), copies of tied ones, and buffers

  torch::nn::Module* module_;
  std::vector<int> cut_;
  std::shared_ptr<std::vector<double>> milliseconds_;  // of this rank's pieces; see StagesOfPieces
  std::vector<std::pair<std::string, at::Tensor>> own_;
  Tensors copies_;                         // of tied parameters that another rank owns
  std::vector<std::string> patterns_;      // of the modules of this rank's stages,
  std::vector<std::string> all_patterns_;  // and of all stages
  std::vector<size_t> positions_;          // of own_ in the whole model's list
  std::vector<int> rank_of_;               // of each parameter of the whole model
  std::vector<pipelining::Fact> facts_;    // that are to be compared with those of the other ranks
  std::shared_ptr<pipelining::Runner> runner_;
};

// Cuts `module` into stages along a dimension of `mesh`, or over `meshes`, of which the i-th has the stages of the schedule's rank i:
// meshes of any sizes, so that some stages may have more ranks than others. The module was built on stage_mesh(mesh), under dt::Spmd or
// dt::DeferredInit; every rank builds it whole, but with DeferredInit parameters take no memory before pipe.materialize(). Lay out
// parameters by parallelize_module and fully_shard in between; what they do with parameters of other ranks' stages does not matter.
//
// `pieces`, in the order of the computation: each takes what the one before gives, the first the microbatch's input. Between any two of
// them the model may be cut.
//
// A parameter that several stages use belongs to the first of them: that rank has it in parameters(), and its gradient is the sum of one
// device. The others have a copy, which takes the new value at each step.
//
// Communicates nothing. Before the first step the ranks compare what each of them was told (once, a few bytes), and all throw where one has
// another cut, schedule, number of microbatches or list of pieces.
//
// Throws for fewer pieces than stages, a piece whose pattern matches nothing, a parameter that no piece uses, and a schedule that does not
// fit the mesh or is incomplete.
inline Pipeline pipeline(torch::nn::Module& module, const DeviceMesh& mesh, const std::vector<Piece>& pieces,
                         const PipelineOptions& options = {}) {
  return Pipeline(module, pipelining::PipelineRanks(mesh, options.dim), pieces, options);
}
inline Pipeline pipeline(torch::nn::Module& module, const std::vector<DeviceMesh>& meshes, const std::vector<Piece>& pieces,
                         const PipelineOptions& options = {}) {
  return Pipeline(module, pipelining::PipelineRanks(meshes), pieces, options);
}

// -- How -----------------------------------------------------------------------------------------------------------------

namespace pipelining::detail {

inline Schedule schedule_for(const PipelineOptions& options, int ranks) {
  require(options.microbatches >= 0, "pipeline", "got {} microbatches; expected a positive number, or 0 for twice as many as ranks",
          options.microbatches);
  const PipelineSize sizes{
      .ranks = ranks, .microbatches = options.microbatches > 0 ? options.microbatches : 2 * ranks, .chunks = options.chunks};
  return options.make_schedule ? options.make_schedule(sizes) : make_schedule(options.schedule, sizes);
}

// `costs`: of each piece.
inline std::vector<int> cut_for(const PipelineOptions& options, const std::vector<double>& costs, int stages) {
  const auto& cut = options.cut;
  if (cut.empty()) return balanced_cut(costs, stages);
  for (const int count : cut) {
    require(count >= 1, "pipeline", "the cut [{}] has a stage of {} pieces; expected one piece or more in each", fmt::join(cut, ", "),
            count);
  }
  const auto pieces = std::accumulate(cut.begin(), cut.end(), int64_t{0});
  require(static_cast<int>(cut.size()) == stages && pieces == static_cast<int64_t>(costs.size()), "pipeline",
          "the cut [{}] is of {} pieces into {} stages; expected {} pieces and the schedule's {} stages; hint: it has the number of pieces "
          "of each stage",
          fmt::join(cut, ", "), pieces, cut.size(), costs.size(), stages);
  return cut;
}

}  // namespace pipelining::detail

inline Pipeline::Pipeline(torch::nn::Module& module, pipelining::PipelineRanks ranks, const std::vector<Piece>& pieces,
                          const PipelineOptions& options)
    : module_(&module) {
  auto schedule = pipelining::detail::schedule_for(options, ranks.size());
  const auto all = module.named_parameters();

  const auto first_of = [&](size_t position) {  // of a parameter that has several names
    const auto same = [&](const auto& item) { return item.value().is_same(all[position].value()); };
    return static_cast<size_t>(std::ranges::find_if(all, same) - all.begin());
  };
  std::vector<std::vector<size_t>> uses;
  auto costs = options.costs;
  for (const auto& piece : pieces) {
    uses.push_back(pipelining::parameters_of(piece, module));
    double elements = 1;
    for (const auto position : uses.back()) elements += static_cast<double>(all[position].value().numel());
    if (options.costs.empty()) costs.push_back(elements);
  }
  require(costs.size() == pieces.size(), "pipeline", "got {} costs of {} pieces; expected one for each piece", costs.size(), pieces.size());
  cut_ = pipelining::detail::cut_for(options, costs, schedule.stages());

  auto stages = pipelining::stages_of(pieces, cut_);
  pipelining::Gathering gathering{std::vector<Tensors>(cut_.size()), options.whole_stages};
  std::vector<int> owner(all.size(), -1);  // the first stage that uses the parameter
  for (int s = 0, p = 0; s < static_cast<int>(cut_.size()); ++s) {
    const bool here = schedule.rank_of_stage[s] == ranks.own();
    for (int i = 0; i < cut_[s]; ++i, ++p) {
      all_patterns_.push_back(pieces[p].modules);
      if (here) patterns_.push_back(pieces[p].modules);
      for (const auto used : uses[p]) {
        const auto position = first_of(used);
        const auto& parameter = all[position].value();
        if (here) gathering.parameters[s].push_back(parameter);
        if (owner[position] < 0) owner[position] = s;
        if (owner[position] == s) continue;
        const auto same = [&](const pipelining::Skip& skip) { return skip.to == s && skip.tied.is_same(parameter); };
        if (std::ranges::any_of(stages.skips, same)) continue;
        stages.skips.push_back({owner[position], s, parameter});
        if (here && schedule.rank_of_stage[owner[position]] != ranks.own()) copies_.push_back(parameter);
      }
    }
  }
  for (size_t i = 0; i < owner.size(); ++i) {
    if (const auto first = first_of(i); first < i) {
      rank_of_.push_back(rank_of_[first]);
      continue;
    }
    require(owner[i] >= 0, "pipeline", "no piece uses the parameter '{}'; hint: name its module in the piece that does", all[i].key());
    rank_of_.push_back(schedule.rank_of_stage[owner[i]]);
    if (rank_of_[i] != ranks.own()) continue;
    positions_.push_back(i);
    own_.emplace_back(all[i].key(), all[i].value());
  }
  milliseconds_ = stages.milliseconds;
  if (ranks.size() > 1) facts_ = pipelining::facts_of(schedule, cut_, all_patterns_);
  runner_ = std::make_shared<pipelining::Runner>(std::move(ranks), std::move(schedule), stages.forwards, stages.skips, gathering);
}

inline std::vector<at::Tensor> Pipeline::parameters() const {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : own_) result.push_back(parameter);
  return result;
}

inline std::vector<torch::nn::Module*> Pipeline::modules() const {
  std::vector<torch::nn::Module*> found;
  std::vector<std::string> names;
  for (const auto& item : module_->named_modules("", /*include_self=*/false)) {
    const auto& name = item.key();
    const auto holds = [&](const std::string& other) { return name.rfind(other + ".", 0) == 0; };
    const bool own = std::ranges::any_of(patterns_, [&](const std::string& pattern) { return detail::matches(pattern, name); });
    if (!own || std::ranges::any_of(names, holds)) continue;
    names.push_back(name);
    found.push_back(item.value().get());
  }
  return found;
}

inline Pipeline::Tensors Pipeline::held() const {
  auto all = parameters();
  all.insert(all.end(), copies_.begin(), copies_.end());
  for (const auto& [name, buffer] : named_buffers()) all.push_back(buffer);
  return all;
}

inline void Pipeline::materialize() const { dtensor::materialize(held()); }
inline void Pipeline::forget_values() const { dtensor::forget_values(held()); }

// Which modules are training: a letter each.
inline std::string Pipeline::mode() const {
  std::string letters(1, module_->is_training() ? 't' : 'e');
  for (const auto& module : module_->modules(/*include_self=*/false)) letters += module->is_training() ? 't' : 'e';
  return letters;
}

inline PipelineStep Pipeline::step(const at::Tensor& input, const at::Tensor& target, const Loss& loss, bool sync) {
  const auto [inputs, targets] = pipelining::cut_batch(input, target, microbatches());
  return step(inputs, targets, loss, sync);
}

inline PipelineStep Pipeline::step(const Tensors& inputs, const Tensors& targets, const Loss& loss, bool sync) {
  require(c10::GradMode::is_enabled(), "pipeline", "step() computes gradients, and they are off; hint: evaluate() needs none");
  return run(inputs, targets, loss, sync);
}

inline PipelineStep Pipeline::evaluate(const at::Tensor& input, const at::Tensor& target, const Loss& loss) {
  const auto [inputs, targets] = pipelining::cut_batch(input, target, microbatches());
  return evaluate(inputs, targets, loss);
}

inline PipelineStep Pipeline::evaluate(const Tensors& inputs, const Tensors& targets, const Loss& loss) {
  const at::NoGradGuard no_grad;
  return run(inputs, targets, loss, false);
}

// Before the first step: dt::pipeline() communicates nothing.
inline void Pipeline::compare_with_others() {
  if (facts_.empty()) return;
  const NoSpmd plain;
  pipelining::require_alike(runner_->ranks(), facts_);
  facts_.clear();
}

inline PipelineStep Pipeline::run(const Tensors& inputs, const Tensors& targets, const Loss& loss, bool sync) {
  require(inputs.size() == targets.size(), "pipeline", "got {} inputs and {} targets; expected one each for {} microbatches", inputs.size(),
          targets.size(), microbatches());
  if (runner_->ranks().size() > 1) pipelining::FailedStep::refuse_later();
  compare_with_others();
  std::vector<pipelining::TensorVector> lists;
  for (const auto& x : inputs) lists.push_back({x});
  const auto losses = runner_->step(
      lists, [&](const pipelining::TensorVector& outputs, int microbatch) { return loss(outputs, targets[microbatch]); }, sync, mode());
  const NoSpmd plain;
  const auto values = pipelining::on_all_ranks(losses, runner_->ranks(), schedule());
  PipelineStep result;
  for (int64_t i = 0; i < values.numel(); ++i) {
    result.losses.push_back(values[i].item<double>());
    result.loss += result.losses.back();
  }
  return result;
}

inline double Pipeline::grad_norm(double norm_type) const {
  require(norm_type > 0, "grad_norm", "got a norm of type {}; expected a positive number, or infinity", norm_type);
  const NoSpmd plain;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  std::vector<size_t> positions;
  for (size_t i = 0; i < own_.size(); ++i) {
    for (auto& gradient : detail::gradients_of("grad_norm", own_[i].second)) {
      gradients.push_back(std::move(gradient));
      positions.push_back(positions_[i]);
    }
  }
  auto powers = at::zeros({static_cast<int64_t>(rank_of_.size())}, at::kDouble);
  for (const auto& spread : detail::spread_of(gradients)) {
    const auto own = detail::powers_of(spread, gradients, norm_type);
    for (size_t i = 0; i < spread.members.size(); ++i)
      powers[static_cast<int64_t>(positions[spread.members[i]])] = own[static_cast<int64_t>(i)];
  }
  powers = runner_->ranks().all_reduce(powers, std::isinf(norm_type) ? ReduceOp::max : ReduceOp::sum);
  return std::isinf(norm_type) ? powers.max().item<double>() : std::pow(powers.sum().item<double>(), 1 / norm_type);
}

inline std::vector<double> Pipeline::measured_costs() const {
  const NoSpmd plain;
  auto costs = at::empty({static_cast<int64_t>(milliseconds_->size())}, at::kDouble);
  const auto own = [](double time) { return std::isinf(time) ? 0 : time; };
  std::ranges::transform(*milliseconds_, costs.data_ptr<double>(), own);
  costs = runner_->ranks().largest(costs);
  std::vector<double> result(costs.data_ptr<double>(), costs.data_ptr<double>() + costs.numel());
  require(std::ranges::all_of(result, [](double time) { return time > 0; }), "pipeline",
          "a piece has not run yet; hint: make a step before you ask for measured costs");
  return result;
}

inline Pipeline::Tensors Pipeline::gather(const std::function<at::Tensor(const at::Tensor&)>& f) const {
  const NoSpmd plain;
  const at::NoGradGuard no_grad;
  Tensors result;
  const auto all = module_->named_parameters();
  for (size_t i = 0; i < rank_of_.size(); ++i) {
    at::Tensor tensor;
    if (rank_of_[i] == runner_->ranks().own()) tensor = f(all[i].value());
    if (tensor.defined()) tensor = full_tensor(tensor);
    result.push_back(pipelining::detail::broadcast_any(runner_->ranks(), tensor, rank_of_[i]));
  }
  return result;
}

inline double Pipeline::clip_grad_norm_(double max_norm, double norm_type) const {
  const double norm = grad_norm(norm_type);
  clip_grads_with_norm_(parameters(), max_norm, norm);
  return norm;
}

}  // namespace dtensor

#pragma GCC visibility pop
