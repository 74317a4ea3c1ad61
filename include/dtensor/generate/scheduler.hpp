// Which rows of which sequences the next pass computes. There are no phases of prompts and of decoding: a sequence has tokens, of which
// some are computed, and each pass computes more of them, as far as a budget of tokens goes (as in vLLM's V1). Depends on nothing that
// ranks do not have alike, so that all ranks decide the same.
#pragma once

#include <dtensor/generate/blocks.hpp>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// One output in the making.
struct Sequence {
  explicit Sequence(Blocks& blocks) : table(blocks) {}
  virtual ~Sequence() = default;

  Tokens tokens;  // prompt and output so far
  int64_t prompt = 0;
  int64_t priority = 0, arrival = 0, index = 0;  // the order of sequences
  bool reads_prefix = true;                      // may begin with blocks that others have filled
  int64_t drafts = 0;                            // rows that the next pass is to verify beyond `tokens`

  PageTable table;
  int64_t computed = 0;   // tokens whose keys and values are in pages
  int64_t cached = -1;    // of those that were found there at first; -1: it has not begun yet
  int64_t preempted = 0;  // how often
};

struct SchedulerOptions {
  int64_t max_requests = 64;      // sequences at a time
  int64_t tokens_per_step = 512;  // rows of a pass
  int64_t chunk = 0;              // rows of one sequence in a pass; 0: as many as fit
};

class Scheduler {
 public:
  struct Part {
    Sequence* sequence;
    int64_t begin, end;  // tokens that the pass computes, and drafts after them
  };
  struct Plan {
    std::vector<Part> parts;
    PageTable::Copies copies;  // of blocks, before the pass
  };

  Scheduler(Blocks& blocks, const SchedulerOptions& options) : blocks_(blocks), options_(options) {}

  bool idle() const { return running_.empty() && waiting_.empty(); }
  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t preemptions() const { return preemptions_; }

  // A new sequence, or one that shares its pages with another.
  void add(Sequence& sequence) { insert(waiting_, sequence); }
  // It has ended. Lets go of its pages.
  void remove(Sequence& sequence);
  // The next pass. Running sequences come first. Where pages are lacking, sequences that wait give theirs back, then the last running one,
  // which is computed again later.
  Plan plan();
  // All sequences are to be computed anew, or go on with what they have.
  void restart();
  void keep();

 private:
  static bool before(const Sequence* a, const Sequence* b) {
    return std::tie(a->priority, a->arrival, a->index) < std::tie(b->priority, b->arrival, b->index);
  }
  static void insert(std::vector<Sequence*>& into, Sequence& sequence) {
    into.insert(std::ranges::lower_bound(into, &sequence, before), &sequence);
  }
  int64_t rows_for(const Sequence& sequence, int64_t budget) const;
  bool give_back_waiting();
  void preempt_last();
  void admit(Plan& plan, int64_t budget);

  Blocks& blocks_;
  SchedulerOptions options_;
  std::vector<Sequence*> running_, waiting_;
  int64_t preemptions_ = 0;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline void Scheduler::remove(Sequence& sequence) {
  std::erase(running_, &sequence);
  std::erase(waiting_, &sequence);
  sequence.table.clear();
}

inline int64_t Scheduler::rows_for(const Sequence& sequence, int64_t budget) const {
  const auto left = static_cast<int64_t>(sequence.tokens.size()) - sequence.computed;
  auto rows = std::min(left, budget);
  if (options_.chunk > 0) rows = std::min(rows, options_.chunk);
  return rows == left ? std::min(left + sequence.drafts, budget) : rows;
}

inline bool Scheduler::give_back_waiting() {
  for (auto i = waiting_.rbegin(); i != waiting_.rend(); ++i) {
    if ((*i)->table.blocks().empty()) continue;
    (*i)->table.clear();
    (*i)->computed = 0;
    return true;
  }
  return false;
}

inline void Scheduler::preempt_last() {
  auto& last = *running_.back();
  running_.pop_back();
  last.table.clear();
  last.computed = 0;
  ++last.preempted;
  ++preemptions_;
  insert(waiting_, last);
}

inline Scheduler::Plan Scheduler::plan() {
  Plan plan;
  auto budget = options_.tokens_per_step;
  const auto preempted_before = preemptions_;
  for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
    auto& sequence = *running_[i];
    const auto end = sequence.computed + rows_for(sequence, budget);
    while (i < running_.size() && !sequence.table.reserve(sequence.computed, end, plan.copies)) {
      if (!give_back_waiting()) preempt_last();
    }
    if (i >= running_.size()) break;
    plan.parts.push_back({&sequence, sequence.computed, end});
    budget -= end - sequence.computed;
  }
  if (preemptions_ == preempted_before) admit(plan, budget);
  return plan;
}

inline void Scheduler::admit(Plan& plan, int64_t budget) {
  while (!waiting_.empty() && running() < options_.max_requests && budget > 0) {
    auto& sequence = *waiting_.front();
    const bool is_fork = !sequence.table.blocks().empty();
    if (!is_fork && sequence.reads_prefix) {
      sequence.computed = sequence.table.match(sequence.tokens, static_cast<int64_t>(sequence.tokens.size()) - 1);
    }
    const auto end = sequence.computed + rows_for(sequence, budget);
    if (!sequence.table.reserve(sequence.computed, end, plan.copies)) {
      if (!is_fork) sequence.table.clear(), sequence.computed = 0;
      // With nothing running, others that wait may hold the pages.
      if (running_.empty() && waiting_.size() > 1) {
        const auto first = waiting_.front();
        waiting_.erase(waiting_.begin());
        const bool gave = give_back_waiting();
        waiting_.insert(waiting_.begin(), first);
        if (gave) continue;
      }
      if (running_.empty() && is_fork && give_back_waiting()) continue;
      return;
    }
    if (sequence.cached < 0) sequence.cached = sequence.computed;
    waiting_.erase(waiting_.begin());
    insert(running_, sequence);
    plan.parts.push_back({&sequence, sequence.computed, end});
    budget -= end - sequence.computed;
  }
}

inline void Scheduler::restart() {
  for (auto* sequence : waiting_) sequence->table.clear(), sequence->computed = 0;
  while (!running_.empty()) preempt_last();
}

inline void Scheduler::keep() {
  for (auto* sequence : running_) sequence->table.forget();
  for (auto* sequence : waiting_) sequence->table.forget();
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
