// A collective or message over gloo that is under way, and the threads that run it when nobody waits for it.
#pragma once

#include "src/comm/transports/gloo/exchange.hpp"

#include <deque>
#include <optional>

namespace dtensor::comm::gloo {

// A job in the background waits as long as its peers live: the deadline is for whoever waits for it.
constexpr std::chrono::hours kUnhurried{24 * 365};

// At most two exchanges with some arithmetic after each. Run once, by the rank that waits or by a Worker.
class Job {
  std::shared_ptr<Link> link_;  // before the exchanges, so that it outlives them

 public:
  Job(std::shared_ptr<Link> link, const Communicator::Call& call, uint64_t stream, std::string group, int self, Milliseconds deadline)
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

  const Communicator::Call call_;
  const std::string group_;
  const int self_;
  const Milliseconds deadline_;

  Deadline end_;
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::idle;
  std::string error_;
};

// Runs jobs in threads of its own: in order in one, or all at once in as many as it takes. They are started when they are needed, and stay.
class Worker {
 public:
  enum class Order { one_by_one, at_once };

  explicit Worker(Order order) : order_(order) {}
  ~Worker() { stop(); }
  void add(std::shared_ptr<Job> job);
  // Ends after the jobs at hand; jobs that are left are dropped.
  void stop();

 private:
  void start_thread();
  void serve();

  const Order order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopped_ = false;
  size_t busy_ = 0;  // threads that run a job
  std::vector<std::thread> threads_;
};

// For all messages of a rank. A message must not wait behind another one, whose other end may come later. What a buffered send has left to
// do is to let go of its memory, so those take turns: many that nobody has received yet take one thread.
struct MessageWorkers {
  Worker buffered_sends{Worker::Order::one_by_one}, others{Worker::Order::at_once};
  void stop() {
    buffered_sends.stop();
    others.stop();
  }
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
