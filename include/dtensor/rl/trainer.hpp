// The loop of PPO, GRPO and their relatives, from options: rollouts, rewards, advantages, updates, evaluation, checkpoints, metrics.
//
//   rl::Trainer<Llama> trainer(rl::read_options({{"algorithm", "grpo"}, {"steps", 300}}), task, {.training = mesh, .generation = mesh,
//                                                                                              .actor = make, .plan = plan});
//   trainer.run([](const rl::Metrics& metrics) { std::cout << rl::line_of(metrics) << '\n'; });
//
// The steps that it consists of are functions of their own (roles.hpp), of which docs/rl.md writes the loop in eight lines.
#pragma once

#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/rl/event_file.hpp>
#include <dtensor/rl/judge.hpp>
#include <dtensor/rl/metrics.hpp>
#include <dtensor/rl/rewards/verifiers.hpp>
#include <dtensor/rl/roles.hpp>
#include <dtensor/rl/verdict_writer.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What is to be learned.
struct Task {
  // Prompts by number, the same on every rank. Those held out are none of the others.
  std::function<Prompt(int64_t number)> prompt{}, held_out{};
  Verifier verifier{};
  std::vector<std::string> kinds{};  // of scores: a verdict's parts
  // With a generative reward model (Placed::verdicts): what it is asked. The verifier gets what it writes in place of the answer.
  VerdictOptions verdicts{};
  Tool tool{};  // answers the model in conversations of several turns, see turns.hpp
  TurnOptions turns{};
  // A prompt and the tokens of a right answer, by number: for options.sft_steps.
  std::function<std::pair<Prompt, generate::Tokens>(int64_t number)> example{};
  generate::Settings settings{};     // stop tokens and the like; max_tokens and the temperature are those of the options
  generate::EngineOptions engine{};  // text_of
};

// Where roles are and how they are made. The reference is where the actor is.
template <class Model, class Values = Model>
struct Placed {
  DeviceMesh training, generation;
  std::function<std::shared_ptr<Model>()> actor;
  Plan plan{};
  std::function<std::shared_ptr<Values>()> critic{};
  Plan critic_plan{};
  std::optional<DeviceMesh> critic_mesh{};             // nothing: where the actor is
  std::function<std::shared_ptr<Model>()> verdicts{};  // a generative reward model with its weights; nothing: there is none
  Plan verdicts_plan{};
  std::optional<DeviceMesh> verdicts_mesh{};  // nothing: where rollouts are
};

// Every rank makes it and calls it alike.
template <class Model, class Values = Model>
class Trainer {
 public:
  // Throws for options that make no sense, and for a critic or examples that options ask for and that are lacking.
  Trainer(const Options& options, Task task, const Placed<Model, Values>& placed);

  // Learns from examples, if there are to be any; goes on from a checkpoint, if asked; then all steps. `told` gets the metrics of each on
  // every rank. Returns false where the program was told to stop; the state is saved then, if options.save is a folder. Ends before the
  // last step where there is nothing more to learn, see why_ended().
  bool run(const std::function<void(const Metrics&)>& told = {});

  // One step of the loop. Where dynamic sampling finds no group whose scores differ, it learns nothing and counts as no step; why_ended()
  // says so. That no answer is right is an error.
  Metrics step();
  // A sentence, where the last step() found nothing to learn; else empty.
  const std::string& why_ended() const { return why_ended_; }
  // The share of held-out prompts whose most probable answer is right.
  double evaluate();
  // Learns from examples, once. run() does it, too, unless it goes on from a checkpoint.
  void imitate();
  // Steps that are done.
  int64_t steps() const { return steps_; }
  Actor<Model>& actor() { return actor_; }
  const Options& options() const { return o_; }

 private:
  std::optional<Batch> collect(Metrics& metrics);
  Batch generate(Metrics& metrics);
  at::Tensor greedy_scores(const std::vector<Prompt>& prompts, RolloutOptions options);
  void judge(Batch& batch);
  void learn(Batch& batch, Metrics& metrics);
  void tell(const Batch& batch, Metrics& metrics) const;
  at::Tensor whole(const Batch& batch, const std::string& name) const;
  State state();
  void check_resumed() const;

  const Options o_;
  const Task task_;
  const DeviceMesh everyone_;
  Actor<Model> actor_;
  Rollouts<Model> rollouts_;
  Judge judge_;
  std::optional<VerdictWriter<Model>> verdicts_;
  std::optional<Reference<Model>> reference_;
  std::optional<Critic<Values>> critic_;
  int64_t steps_ = 0, next_prompt_ = 0, generations_ = 0;
  double kl_beta_ = 0;
  // Of the run, which one that goes on has to share.
  std::string algorithm_;
  int64_t seed_ = 0, lr_steps_ = 0;
  double lr_end_ = 1;
  bool has_imitated_ = false;
  std::string why_ended_;
};

}  // namespace dtensor::rl

#include <dtensor/rl/trainer_steps.hpp>

#pragma GCC visibility pop
