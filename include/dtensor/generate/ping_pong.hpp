// Text from a model whose experts lie on ranks of their own: the rows of a pass go back and forth in microbatches of whole sequences.
//
//   dt::generate::PingPong passes(pipe);                                    // of dt::disaggregate, on every rank of both meshes
//   if (attention.contains_this_rank()) {
//     dt::generate::Engine engine(passes.forward(), &*model, {.split_over = ""});
//     auto texts = engine.generate(prompts);
//     passes.end();
//   } else {
//     passes.serve();                                                       // takes part in every pass until end()
//   }
//
// Engine, cache and settings are those of any model: keys and values lie on attention's ranks, as their heads do.
#pragma once

#include <dtensor/generate/runner.hpp>
#include <dtensor/pipeline/disaggregate.hpp>

#include <ATen/ops/full.h>

#pragma GCC visibility push(default)

namespace dtensor::generate {

class PingPong {
 public:
  // Both must outlive it. Communicates nothing.
  explicit PingPong(Pipeline& pipe) : pipe_(&pipe) {}

  // For an Engine on attention's ranks. All of them compute each pass, so the engine's `split_over` is empty. A pass communicates how many
  // rows its microbatches have (8 bytes each, to all ranks of both meshes) and what the pipeline's evaluation does.
  Forward forward() {
    return [this](const at::Tensor& ids) { return run(ids); };
  }
  // On attention's ranks, when there is nothing more to generate: serve() returns on the others. Not after a pass that failed.
  void end();
  // On the experts' ranks. Throws what a pass throws, on every rank.
  void serve();

 private:
  at::Tensor run(const at::Tensor& ids);
  Tokens tell(const Tokens& lengths) const;
  void require_mesh(int rank, const char* call) const;
  Pipeline* pipe_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// What layers ask while microbatches take turns: the step of the one that is computed. Null: a row of no sequence.
class TakesTurns final : public Decoding {
 public:
  TakesTurns(World& world, std::vector<Step*> steps) : Decoding(world), steps_(std::move(steps)) {}

  at::Tensor positions(int64_t rows, int64_t limit) override {
    if (auto* step = now()) return step->positions(rows, limit);
    return whole_tensor(Tokens(rows, 0));
  }
  bool shares_heads(const at::Tensor& q, int64_t key_heads) override {
    const auto step = std::ranges::find_if(steps_, [](const Step* each) { return each != nullptr; });
    return (*step)->shares_heads(q, key_heads);
  }
  at::Tensor attention(const AttentionArguments& a) override {
    if (auto* step = now()) return step->attention(a);
    return at::zeros({1, a.q.size(1), a.q.size(2), a.v.size(3)}, a.q.options());
  }
  at::Tensor scored_rows(const at::Tensor& x) override {
    auto* step = now();
    return step ? step->scored_rows(x) : x;
  }

 private:
  Step* now() const { return steps_.at(BatchRows::current()->begin); }
  std::vector<Step*> steps_;
};

// The microbatches of a pass.
class Turns {
 public:
  // Of ids int64 [1, rows], under `count` microbatches.
  Turns(const at::Tensor& ids, int64_t count) {
    auto* decoding = Decoding::current();
    if (auto* paged = dynamic_cast<PagedStep*>(decoding)) {
      rows_ = in_parts(paged->rows(), count);
      for (auto& part : rows_) {
        wanted_.push_back({part.rows(), static_cast<int64_t>(part.scored.size())});
        part = padded(std::move(part));
        ids_.push_back(plain_tensor(part.ids).unsqueeze(0));
      }
      for (const auto& part : rows_) steps_.push_back(std::make_unique<PagedStep>(World::current(), part, *paged));
    } else {
      const NoSpmd plain;
      ids_.push_back(full_tensor(ids));
    }
    while (static_cast<int64_t>(ids_.size()) < count) ids_.push_back(plain_tensor({0}).unsqueeze(0));
    if (decoding == nullptr) return;
    std::vector<Step*> steps(count, nullptr);
    std::ranges::transform(steps_, steps.begin(), [](const auto& step) { return step.get(); });
    if (steps_.empty()) steps[0] = &dynamic_cast<Step&>(*decoding);
    takes_turns_.emplace(World::current(), std::move(steps));
  }
  ~Turns() {
    takes_turns_.reset();
    while (!steps_.empty()) steps_.pop_back();  // regions end in the order in which they nest
  }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  const std::vector<at::Tensor>& ids() const { return ids_; }

  // From the scores of each microbatch, those of the pass.
  at::Tensor joined(const std::vector<at::Tensor>& scores) const {
    if (wanted_.empty()) return scores[0];
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < wanted_.size(); ++i) {
      const auto count = steps_[i]->picked() ? wanted_[i].scored : wanted_[i].rows;
      all.push_back(scores[i].narrow(1, 0, count));
    }
    return at::cat(all, 1);
  }

 private:
  struct Wanted {
    int64_t rows = 0, scored = 0;
  };
  std::vector<at::Tensor> ids_;
  std::vector<Wanted> wanted_;  // without padding; of the microbatches that have sequences
  std::vector<StepRows> rows_;
  std::vector<std::unique_ptr<PagedStep>> steps_;
  std::optional<TakesTurns> takes_turns_;
};

}  // namespace detail

inline void PingPong::require_mesh(int rank, const char* call) const {
  require(pipe_->ranks().own() == rank, "PingPong", "{}() is for {} ranks; this one is in {}; hint: the others call {}", call,
          rank == 0 ? "attention's" : "the experts'", pipe_->ranks().meshes()[pipe_->ranks().own()].str(),
          rank == 0 ? "serve()" : "an Engine with forward(), and end()");
}

// The lengths of the microbatches, from attention's ranks to all; -1: no more passes.
inline Tokens PingPong::tell(const Tokens& lengths) const {
  const NoSpmd plain;
  const auto all = pipe_->ranks().from(0, detail::plain_tensor(lengths));
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

inline at::Tensor PingPong::run(const at::Tensor& ids) {
  require_mesh(0, "forward");
  const detail::Turns turns(ids, pipe_->microbatches());
  Tokens lengths;
  for (const auto& each : turns.ids()) lengths.push_back(each.size(1));
  tell(lengths);
  std::vector<at::Tensor> scores(turns.ids().size());
  pipe_->evaluate(turns.ids(), turns.ids(), [&](const at::Tensor& y, const at::Tensor&) {
    scores.at(BatchRows::current()->begin) = y;
    return at::zeros({});
  });
  return turns.joined(scores);
}

inline void PingPong::end() {
  require_mesh(0, "end");
  tell(Tokens(pipe_->microbatches(), -1));
}

inline void PingPong::serve() {
  require_mesh(1, "serve");
  while (true) {
    const auto lengths = tell(Tokens(pipe_->microbatches(), 0));
    if (lengths[0] < 0) return;
    std::vector<at::Tensor> ids;
    for (const auto length : lengths) ids.push_back(detail::plain_tensor(Tokens(length, 0)).unsqueeze(0));
    pipe_->evaluate(ids, ids, [](const at::Tensor& y, const at::Tensor&) { return y; });
  }
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
