// A collective over gloo that is under way, and the thread that carries it on when nobody waits for it.
#pragma once

#include "src/comm/gloo/exchange.hpp"

#include <deque>
#include <optional>

namespace dtensor::comm::gloo {

// A job in the background waits as long as its peers live: the deadline is for whoever waits for it.
constexpr std::chrono::hours kUnhurried{24 * 365};

// At most two exchanges with some arithmetic after each. Run once, by the rank that waits or by a Worker.
class Job {
  std::shared_ptr<Link> link_;  // before the exchanges, so that it outlives them

 public:
  Job(std::shared_ptr<Link> link, const CallInfo& call, uint64_t stream, std::string group, int self, Milliseconds deadline)
      : link_(std::move(link)), first(*link_, call, stream, 0), second(*link_, call, stream, 1), call_(call), group_(std::move(group)),
        self_(self), deadline_(deadline), end_(Clock::now() + kUnhurried) {}

  std::vector<at::Tensor> keep;  // memory that the exchanges use: declared before them, so that it outlives them
  Exchange first, second;
  std::function<void()> after_first;  // may be empty
  bool has_second = false;

  // Posts what can be; a failure shows when the job is run.
  void post();

  // Runs the job here if nobody else does; blocks until it has ended. Throws Error.
  void wait();
  // Whether the caller may run it, or hand it to a worker; then nobody else may.
  bool claim();
  // Blocks until it has ended; keeps the error for wait().
  void run();
  bool ended();

 private:
  enum class State { idle, claimed, done, failed };
  void end(State state);
  bool has_ended() const { return state_ == State::done || state_ == State::failed; }

  const CallInfo call_;
  const std::string group_;
  const int self_;
  const Milliseconds deadline_;

  Deadline end_;
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::idle;
  std::string error_;
};

// A thread that runs jobs in order. Started by the first one.
class Worker {
 public:
  ~Worker() { stop(); }
  void add(std::shared_ptr<Job> job);
  // Ends after the job at hand; jobs that are left are dropped.
  void stop();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopped_ = false;
  std::thread thread_;
};

// What the caller holds. Dropped without a wait, the job goes on in the background.
class JobWork final : public Work {
 public:
  JobWork(std::shared_ptr<Job> job, std::shared_ptr<Worker> worker) : job_(std::move(job)), worker_(std::move(worker)) {}
  ~JobWork() override { carry_on(); }
  void wait() override { job_->wait(); }
  bool done() override {
    carry_on();
    return job_->ended();
  }

 private:
  void carry_on() {
    if (job_->claim()) worker_->add(job_);
  }

  std::shared_ptr<Job> job_;
  std::shared_ptr<Worker> worker_;
};

}  // namespace dtensor::comm::gloo
