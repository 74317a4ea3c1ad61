// Text from a model that trains: continuous batching over pages of keys and values.
//
//   dtensor::generate::Engine engine(*model);                             // on a mesh: on every rank, inside Spmd or not
//   auto texts = engine.generate({prompt, other}, {.max_tokens = 40, .seed = 7});
//
//   auto later = engine.submit({.prompt = prompt, .on_piece = [](const auto& piece) { std::cout << piece.text; }});
//   auto completion = later.get();                                        // works until this one is there
//
//   optimizer.step();
//   engine.load_weights(version);                                         // what the cache holds is forgotten
//
// Requests come and go between passes. The tokens of a request depend on its prompt, settings and seed, and not on others: a token is drawn
// by a number that is a function of seed, output and position. On a mesh every rank calls alike, in the same order, and gets the same.
// Ranks that ask for other things, draw other tokens or fail alone are noticed: then every rank throws.
//
// A callback may submit, cancel and abort: what it ends takes its place when the pass is over. It cannot run passes or change weights.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/generate/agreement.hpp>
#include <dtensor/generate/batch_invariant.hpp>
#include <dtensor/generate/drafts.hpp>
#include <dtensor/generate/groups.hpp>
#include <dtensor/generate/request.hpp>
#include <dtensor/generate/runner.hpp>
#include <dtensor/generate/scheduler.hpp>
#include <dtensor/generate/weights.hpp>

#include <ATen/ops/log_softmax.h>
#include <torch/nn/module.h>

#include <exception>
#include <memory>

#pragma GCC visibility push(default)

namespace dtensor::generate {

struct EngineOptions {
  int64_t cache_bytes = int64_t{256} << 20;       // of keys and values, on each rank, at most
  int64_t max_requests = 64;                      // outputs that are worked on at a time
  int64_t tokens_per_step = 512;                  // rows of a pass
  int64_t chunk = 0;                              // of a prompt, in a pass; 0: as much as fits
  int64_t max_length = 0;                         // of prompt and output; 0: as far as the cache goes
  bool share_prefixes = true;                     // prompts that begin alike share blocks
  bool batch_invariant = false;                   // passes inside of BatchInvariant: no bit depends on what shares a pass
  std::function<std::string(int64_t)> text_of{};  // of a token; empty: a byte
  std::shared_ptr<Drafter> drafter{};             // guesses tokens; see drafts.hpp
  int64_t drafts = 8;                             // guesses at a time, for an output
  int64_t drafts_per_step = 64;                   // guesses of a pass: where many outputs are under way, each gets fewer
  // The mesh dimension along which groups of ranks share the prompts of generate(); empty: none.
  std::string split_over = "dp";
};

// What an engine did so far; of groups that decode apart, this rank's.
struct EngineCounts {
  int64_t passes = 0;           // of the model
  int64_t rows = 0;             // that these computed
  int64_t tokens = 0;           // of outputs
  int64_t sequence_passes = 0;  // passes, counted for each output that got tokens in it
  int64_t preemptions = 0;      // outputs whose pages were taken from them
  int64_t blocks_found = 0;     // of prompts that began as others did
  int64_t most_blocks = 0;      // in use at a time
};

class Engine;

namespace detail {
struct Group;
struct Growing;
struct Pass;
class BeamSearch;
}  // namespace detail

// A request under way. Copies stand for the same one. The engine must outlive it.
class Future {
 public:
  bool ready() const;
  // Works, for all requests, until this one has ended. Throws what ended it, if it failed.
  Completion get();
  // Ends it; get() then gives what there is. Every rank calls it.
  void cancel();

 private:
  friend class Engine;
  Future(Engine& engine, std::shared_ptr<detail::Group> group) : engine_(&engine), group_(std::move(group)) {}
  Engine* engine_;
  std::shared_ptr<detail::Group> group_;
};

class Engine {
 public:
  // A model with forward(ids), as in training; its parameters may lie on a mesh. It must outlive the engine. Runs small passes to see
  // whether its attention can take keys and values from pages (Runner). Throws when the cache has no room for a block.
  template <class Model>
  requires requires(Model& model, const at::Tensor& ids) { model.forward(ids); }
  explicit Engine(Model& model, const EngineOptions& options = {})
      : Engine([&model](const at::Tensor& ids) { return at::Tensor(model.forward(ids)); }, &model, options) {}
  // Any function of ids. `module`: whose mode is set to evaluation, and whose parameters name the mesh; may be null.
  Engine(Forward forward, torch::nn::Module* module, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws, and takes nothing, for an empty prompt, tokens outside of the vocabulary, settings that make no sense, and a request that is
  // longer than max_length or than the cache.
  Future submit(Request request);
  // The completions of these prompts, on every rank. Where the mesh has the dimension EngineOptions::split_over, the parameters are whole
  // along it, and nothing else is under way, each group along it decodes a share: the prompts are cut into as many runs as there are
  // groups. Passes then communicate within groups only, and at the end the ranks that have one place in their groups exchange completions,
  // by two all_gathers. The cache is forgotten after that. Throws what the first prompt that fails throws, on every rank.
  std::vector<Completion> generate(const std::vector<Tokens>& prompts, const Settings& settings = {});
  // The same for requests that have settings of their own. Callbacks are called in the group that decodes the request.
  std::vector<Completion> generate(const std::vector<Request>& requests);

  // One pass; nothing when there is nothing to do. Throws what ends all requests: an error of the model, or of a rank. Requests that fail
  // by themselves (NaN scores, a callback that throws) keep their errors. Where ranks were asked for other things, every rank throws.
  void step();
  bool idle() const { return groups_.empty(); }
  // Ends all requests; they give what there is.
  void abort();

  // The model's parameters have changed, and are `version` from now on. Cached prefixes are forgotten. Outputs under way are computed anew
  // from the new weights, or (recompute = false) go on with the keys and values of the old ones. The first 16 calls, and
  // each 16th after that, try again whether attention can take keys and values from pages. On a mesh every rank calls it.
  void load_weights(int64_t version, bool recompute = true);
  // Copies the weights of the same names first, see copy_weights(): from a module on any mesh and in any layout.
  void load_weights(const torch::nn::Module& from, int64_t version, bool recompute = true);
  void load_weights(const NamedWeights& from, int64_t version, bool recompute = true);
  int64_t version() const { return version_; }

  EngineCounts counts() const;
  int64_t blocks() const { return blocks_->count(); }
  int64_t blocks_unused() const { return blocks_->unused(); }
  int64_t cache_bytes() const { return blocks() * runner_.bytes_of_block(); }
  const Runner& runner() const { return runner_; }

 private:
  friend class Future;
  friend class detail::BeamSearch;
  int64_t longest() const;
  void check_request(const Request& request) const;
  std::vector<Completion> generate_here(const std::vector<Request>& requests);
  std::vector<Completion> generate_in_groups(const std::vector<Request>& requests);
  void tell_drafter(const std::vector<Request>& requests, const std::vector<Completion>& completions);
  void propose();
  void observe(detail::Growing& output);
  void run(const Scheduler::Plan& plan);
  void advance(detail::Pass& pass, size_t part);
  int64_t draw(detail::Pass& pass, detail::Growing& output, int64_t row);
  void append(detail::Pass& pass, detail::Growing& output, int64_t row, int64_t token, const std::optional<Distribution>& from);
  void fork(detail::Pass& pass, detail::Growing& first, int64_t row);
  void finish(detail::Growing& output, Finish finish);
  void end(detail::Group& group, Finish finish, std::exception_ptr error = {});
  void end_all(Finish finish, std::exception_ptr error = {});
  void forget_ended();
  void refuse_in_step(const char* what) const;
  const DeviceMesh* together() const;
  void agree(const detail::Pass& pass);
  void tell_failure() const noexcept;

  const EngineOptions options_;
  torch::nn::Module* const module_;
  Runner runner_;
  const std::optional<DeviceMesh> others_;  // this rank's in other groups that decode apart
  const std::optional<DeviceMesh> group_;   // the ranks that pass together
  std::unique_ptr<Blocks> blocks_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<std::shared_ptr<detail::Group>> groups_;
  int64_t arrivals_ = 0, version_ = 0, steps_ = 0;
  bool in_step_ = false, apart_ = false;
  detail::Asked asked_;  // since the last step
  EngineCounts counts_;
};

}  // namespace dtensor::generate

#include <dtensor/generate/engine_generate.hpp>
#include <dtensor/generate/engine_steps.hpp>

#pragma GCC visibility pop
