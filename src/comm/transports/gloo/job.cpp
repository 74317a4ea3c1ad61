// Runs collectives over gloo, in the foreground and in the background.
#include "src/comm/transports/gloo/job.hpp"

#include <dtensor/base/error.hpp>

#include <gloo/common/error.h>

#include <system_error>

namespace dtensor::comm::gloo {

namespace {

// How long a background job that is told to give up gets to say what it waited for.
constexpr std::chrono::seconds kLastWords{2};

}  // namespace

void Job::post() {
  NoBrokenPipeSignal guard;
  try {
    first.post_receives();
    if (has_second) second.post_receives();
    first.post_sends();
  } catch (const ::gloo::Exception& error) {
    error_ = failure(call_, group_, link_->explain(self_, error.what()));
    end(State::failed);
  }
}

void Job::run() {
  try {
    first.finish(self_, end_, [this] { call_.event.started(); });
    if (after_first) after_first();
    if (has_second) {
      NoBrokenPipeSignal guard;
      second.post_sends();
      second.finish(self_, end_);
    }
    end(State::done);
    return;
  } catch (const Broken& broken) {
    error_ = failure(call_, group_, broken.why);
  } catch (const Late&) {
    error_ = lateness(call_, group_, deadline_, first.absent());
  } catch (const ::gloo::Exception& error) {
    error_ = failure(call_, group_, link_->explain(self_, error.what()));
  }
  end(State::failed);
}

void Job::end(State state) {
  {
    std::lock_guard lock(mutex_);
    if (state == State::done) keep.clear();  // now, not when the last holder goes: ranks ask who else has a tensor's memory
    state_ = state;
  }
  state == State::done ? call_.event.done() : call_.event.failed();
  changed_.notify_all();
}

bool Job::claim() {
  std::lock_guard lock(mutex_);
  if (state_ != State::idle) return false;
  state_ = State::claimed;
  return true;
}

bool Job::ended() {
  std::lock_guard lock(mutex_);
  return has_ended();
}

void Job::wait() {
  const auto end_of_wait = Clock::now() + deadline_;
  if (claim()) {
    end_ = end_of_wait;
    run();
  }
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, end_of_wait, [&] { return has_ended(); })) {
    end_ = Clock::now();
    link_->interrupt();
    changed_.wait_for(lock, kLastWords, [&] { return has_ended(); });
  }
  if (state_ == State::done) return;
  call_.event.failed();
  fail(name(call_.kind), "{}", has_ended() ? error_ : failure(call_, group_, "the deadline passed while an earlier call was under way"));
}

void Worker::add(std::shared_ptr<Job> job) {
  std::lock_guard lock(mutex_);
  if (stopped_) return;
  jobs_.push_back(std::move(job));
  if (threads_.size() < (order_ == Order::at_once ? busy_ + jobs_.size() : 1)) start_thread();
  changed_.notify_all();
}

// Where the system gives no more threads, jobs wait for those that there are.
void Worker::start_thread() {
  try {
    threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {
    if (threads_.empty()) throw;
  }
}

void Worker::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void Worker::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopped_ || !jobs_.empty(); });
    if (stopped_) return;
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    ++busy_;
    lock.unlock();
    job->run();
    job.reset();
    lock.lock();
    --busy_;
  }
}

}  // namespace dtensor::comm::gloo
