// A slot is where the ranks of one collective meet, when ranks are threads. Each rank posts its input and result. The last one to arrive
// cuts the collective into tasks, and every waiting rank runs tasks until none is left, whichever rank they belong to. So a rank that is
// busy elsewhere, or has dropped its Work, delays nobody, and waits in different orders cannot deadlock.
#pragma once

#include <dtensor/comm/transport.hpp>

#include "src/comm/describe.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace dtensor::comm::threads {

// What one rank brings.
struct Entry {
  Communicator::Call call;
  std::string failed;  // why this rank may be out of step, see FailedOperators
  at::Tensor input, result;
  void* in = nullptr;
  void* out = nullptr;
  std::vector<int64_t> send, recv;  // counts: all_gather, reduce_scatter (send); all_to_all (both)
  bool posted = false;
};

// A piece of work: copy `count` elements from member `from` to member `to`, or reduce them over all members (`from` < 0)
// into member `to` or into all (`to` < 0). Offsets are in elements.
struct Task {
  int from, to;
  int64_t source, destination, count;
};

class Slot {
 public:
  explicit Slot(std::vector<int> ranks) : ranks_(std::move(ranks)), entries_(ranks_.size()) {}

  // The next five are called under the group's lock.
  // Returns whether everyone has posted; then start() must follow. Fails the slot when the calls disagree.
  bool post(int member, Entry entry);
  bool posted(int member) const { return entries_[member].posted; }
  // A rank that turns out to be out of step, and why.
  struct OutOfStep {
    int rank;
    std::string why;
  };
  const std::optional<OutOfStep>& out_of_step() const { return out_of_step_; }
  // Makes every wait report failure, unless everyone has posted.
  void fail_if_incomplete(const std::string& why);
  // The world ranks that have not posted.
  std::vector<int> absent() const;

  // Called once, by the rank that posted last.
  void start();

  // Helps, then blocks until done, failed or late.
  enum class Outcome { done, failed, late };
  Outcome wait(Milliseconds deadline);
  const std::string& error() const { return error_; }

  // Helps; returns whether wait() would return or throw at once.
  bool poll();

 private:
  enum State : int { kOpen, kReady, kDone, kFailed };

  void check_agreement(int member);
  // Of an all_to_all: what one member sends is what the other expects.
  void check_pieces(size_t from, size_t to);
  void fail(const std::string& why);
  void plan(bool whole);
  int64_t traffic() const;
  void add_task(Task task, bool whole);
  void run_tasks();
  void run(const Task& task) const;
  void finish();
  void set_state(State state);
  bool sleep_until(State at_least, std::chrono::steady_clock::time_point end);

  const std::vector<int> ranks_;  // world ranks, for errors
  std::vector<Entry> entries_;
  std::vector<Task> tasks_;
  bool large_ = false;
  int arrived_ = 0;
  std::optional<OutOfStep> out_of_step_;
  std::string error_;

  std::atomic<int> state_{kOpen};
  std::atomic<size_t> next_task_{0}, tasks_done_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace dtensor::comm::threads
