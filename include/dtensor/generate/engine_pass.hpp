// What an engine keeps of its requests, and how a plan becomes rows of a pass, see engine.hpp.
#pragma once

#include <dtensor/generate/batch_invariant.hpp>
#include <dtensor/generate/drafts.hpp>
#include <dtensor/generate/request.hpp>
#include <dtensor/generate/runner.hpp>
#include <dtensor/generate/scheduler.hpp>

#include <torch/nn/module.h>

#include <deque>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::generate {

namespace detail {

struct Group;

// One output of a request, in the making.
struct Growing final : Sequence {
  Growing(Blocks& blocks, Group& of, int64_t number);
  Group& group;
  Output output;
  GrowingText text;
  std::vector<Draft> guesses;
  int64_t observed = 0;  // tokens that the drafter knows
  bool ended = false;
};

struct Group {
  Request request;
  int64_t arrival = 0;
  std::vector<std::unique_ptr<Growing>> outputs;  // the first, and when its prompt is computed the others
  Completion completion;
  std::exception_ptr error;
  bool ended = false;
};

inline Growing::Growing(Blocks& blocks, Group& of, int64_t number) : Sequence(blocks), group(of) {
  tokens = of.request.prompt;
  prompt = observed = static_cast<int64_t>(tokens.size());
  priority = of.request.priority;
  arrival = of.arrival;
  index = number;
  reads_prefix = !of.request.settings.prompt_logprobs;
}

// The module's first distributed tensor says on which mesh it lies.
inline std::optional<DeviceMesh> mesh_of(const torch::nn::Module* module) {
  if (!module) return {};
  for (const auto& parameter : module->parameters()) {
    if (const auto* layout = find_layout(parameter)) return layout->mesh();
  }
  return {};
}

// While it lives, a module is in evaluation mode. Each of its modules then has the mode again that it had.
class Evaluating {
 public:
  explicit Evaluating(torch::nn::Module& module) {
    modes_.emplace_back(&module, module.is_training());
    for (const auto& each : module.modules(/*include_self=*/false)) modes_.emplace_back(each.get(), each->is_training());  // parents first
    if (std::ranges::none_of(modes_, [](const auto& mode) { return mode.second; })) modes_.clear();
    else module.eval();
  }
  ~Evaluating() {
    for (const auto& [module, training] : modes_) module->train(training);
  }
  Evaluating(const Evaluating&) = delete;
  Evaluating& operator=(const Evaluating&) = delete;

 private:
  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
};

inline Forward in_evaluation(Forward forward, torch::nn::Module* module, bool batch_invariant) {
  return [forward = std::move(forward), module, batch_invariant](const at::Tensor& ids) {
    std::optional<InvariantRows> rows;
    if (batch_invariant || ids.numel() <= few_rows()) rows.emplace(/*products_only=*/!batch_invariant);
    std::optional<Evaluating> mode;
    if (module) mode.emplace(*module);
    return forward(ids);
  };
}

inline std::vector<TokenLogprob> most_probable(std::vector<TokenLogprob> all, int64_t most) {
  const auto before = [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
  };
  most = std::min(most, static_cast<int64_t>(all.size()));
  std::ranges::partial_sort(all, all.begin() + most, before);
  all.resize(most);
  return all;
}

// Of a tree's nodes, which of them each sees: its ancestors and itself.
inline std::vector<uint64_t> ancestors_of(const std::vector<Draft>& drafts, int64_t count) {
  std::vector<uint64_t> sees(count);
  for (int64_t i = 0; i < count; ++i) sees[i] = (drafts[i].parent < 0 ? 0 : sees[drafts[i].parent]) | uint64_t{1} << i;
  return sees;
}

// While it lives, an engine is in a step.
class InStep {
 public:
  explicit InStep(bool& in_step) : in_step_(in_step) { in_step_ = true; }
  ~InStep() { in_step_ = false; }
  InStep(const InStep&) = delete;
  InStep& operator=(const InStep&) = delete;

 private:
  bool& in_step_;
};

// What a plan becomes.
struct Pass {
  struct Place {            // of a part
    int64_t scored = 0;     // its first scored row
    int64_t of_prompt = 0;  // so many of them are for log-probabilities of the prompt
    int64_t drafts = 0;     // rows after that of the last token
    bool is_chain = true;
  };

  explicit Pass(const Scheduler::Plan& from) : plan(from) {
    for (const auto& part : plan.parts) add(part, static_cast<Growing&>(*part.sequence));
  }

  void add(const Scheduler::Part& part, Growing& output) {
    const auto count = static_cast<int64_t>(output.tokens.size()), end = std::min(part.end, count);
    Place place{static_cast<int64_t>(rows.scored.size()), 0, part.end - end, is_chain(output.guesses)};
    RowSpan span{rows.rows(), 0, part.begin, output.table.blocks().data(), nullptr};
    for (auto position = part.begin; position < end; ++position) {
      const bool of_prompt = output.group.request.settings.prompt_logprobs && output.output.tokens.empty() && position + 1 < output.prompt;
      if (of_prompt || position + 1 == count) rows.scored.push_back(rows.rows());
      place.of_prompt += of_prompt && position + 1 < count;
      add_row(output.tokens[position], position);
    }
    before.emplace_back(std::span(output.tokens).first(part.begin));
    if (place.drafts > 0 && !place.is_chain) {
      span.end = rows.rows();
      rows.spans.push_back(span);
      masks.push_back(ancestors_of(output.guesses, place.drafts));
      span = {rows.rows(), 0, count, output.table.blocks().data(), masks.back().data()};
      before.emplace_back(std::span(output.tokens));
    }
    std::vector<int64_t> depths;
    for (int64_t i = 0; i < place.drafts; ++i) {
      const auto parent = output.guesses[i].parent;
      depths.push_back(parent < 0 ? 0 : depths[parent] + 1);
      rows.scored.push_back(rows.rows());
      add_row(output.guesses[i].token, count + depths.back());
    }
    span.end = rows.rows();
    rows.spans.push_back(span);
    places.push_back(place);
  }

  void add_row(int64_t token, int64_t position) {
    rows.ids.push_back(token);
    rows.positions.push_back(position);
  }

  const Scheduler::Plan& plan;
  StepRows rows;
  std::vector<Place> places;
  std::vector<std::span<const int64_t>> before;
  std::deque<std::vector<uint64_t>> masks;
  at::Tensor scores, logprobs;             // [scored rows, vocabulary]
  std::vector<std::exception_ptr> errors;  // of parts, where the model was run for each by itself
};

}  // namespace detail

}  // namespace dtensor::generate

#pragma GCC visibility pop
