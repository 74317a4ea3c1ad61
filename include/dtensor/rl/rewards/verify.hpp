// Verifiers that run beside each other, each answer within a deadline. One that runs on, throws, or gives NaN scores 0 and is counted.
//
//   rl::Verifiers verify([](const std::string& text, const nlohmann::json& truth) { return rl::Verdict{rl::exact_score(text, truth)}; });
//   const auto found = verify(texts, truths);          // found.verdicts[i], found.failed, found.late
#pragma once

#include <dtensor/base/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct Verdict {
  double score = 0;
  bool right = false;   // what evaluations count; may be false where a score has parts
  bool flawed = false;  // right by reasoning that is not (FAPO)
  enum class How { ended, failed, late } how = How::ended;
  std::vector<double> parts{};  // the score kind by kind, where a task names kinds (GDPO)
};

// A function of an answer's text and of what its prompt knows. Several threads call it.
using Verifier = std::function<Verdict(const std::string& text, const nlohmann::json& truth)>;

struct VerifyOptions {
  double seconds = 10;  // for an answer
  int64_t threads = 1;
  // Threads that may be lost to verifiers that never return, in the life of a Verifiers; then it throws. (A thread cannot be stopped.)
  int64_t most_lost = 16;
};

struct Verified {
  std::vector<Verdict> verdicts;
  int64_t failed = 0, late = 0;
  std::string why;  // the first one failed
};

class Verifiers {
 public:
  // Throws without a verifier, for seconds that are not positive, and for fewer than 1 thread.
  explicit Verifiers(Verifier verifier, const VerifyOptions& options = {});
  // Waits for threads that are not lost. What the verifier refers to has to outlive those that are.
  ~Verifiers();
  Verifiers(const Verifiers&) = delete;
  Verifiers& operator=(const Verifiers&) = delete;

  // Verdicts in the order of the texts. Throws for lists of other lengths and where more threads are lost than options.most_lost.
  Verified operator()(std::vector<std::string> texts, std::vector<nlohmann::json> truths);

 private:
  using Clock = std::chrono::steady_clock;
  struct Job;
  struct Shared;
  static void work(const std::shared_ptr<Shared>& shared, int64_t number);
  void lose_late_ones(std::vector<Job>& jobs);
  void wait_awake(std::unique_lock<std::mutex>& lock) const;

  const VerifyOptions options_;
  std::shared_ptr<Shared> shared_;
  std::map<int64_t, std::thread> threads_;
  int64_t next_thread_ = 0, lost_ = 0;
};

// -- How ------------------------------------------------------------------------------------------------------------------

struct Verifiers::Job {
  std::string text;
  nlohmann::json truth;
  Verdict verdict{};
  std::string why{};
  int64_t thread = -1;
  Clock::time_point begun{};
  bool ended = false;  // or given up
};

// What threads have in common, also those that are lost.
struct Verifiers::Shared {
  explicit Shared(Verifier f) : verifier(std::move(f)) {}
  const Verifier verifier;
  std::mutex mutex;
  std::condition_variable to_do, done;
  std::shared_ptr<std::vector<Job>> jobs;  // a lost thread keeps those that it belongs to
  size_t next = 0;                         // of the jobs, the first that no thread has taken
  std::atomic<int64_t> open = 0;
  bool closing = false;
};

inline Verifiers::Verifiers(Verifier verifier, const VerifyOptions& options) : options_(options) {
  require(verifier != nullptr, "rl::Verifiers", "got no verifier");
  require(options.seconds > 0 && options.threads > 0, "rl::Verifiers", "got {} seconds and {} threads; expected positive numbers",
          options.seconds, options.threads);
  shared_ = std::make_shared<Shared>(std::move(verifier));
}

inline Verifiers::~Verifiers() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->closing = true;
  }
  shared_->to_do.notify_all();
  for (auto& [number, thread] : threads_) thread.join();
}

inline void Verifiers::work(const std::shared_ptr<Shared>& shared, int64_t number) {
  std::unique_lock lock(shared->mutex);
  while (true) {
    const auto is_waiting = [&] { return shared->jobs && shared->next < shared->jobs->size(); };
    shared->to_do.wait(lock, [&] { return shared->closing || is_waiting(); });
    if (!is_waiting()) return;
    const auto jobs = shared->jobs;
    auto& job = (*jobs)[shared->next++];
    job.thread = number;
    job.begun = Clock::now();
    lock.unlock();
    Verdict verdict;
    std::string why;
    try {
      verdict = shared->verifier(job.text, job.truth);
      const auto is_number = [](double x) { return std::isfinite(x); };
      if (!is_number(verdict.score) || !std::ranges::all_of(verdict.parts, is_number)) why = "the score is NaN or infinite";
    } catch (const std::exception& error) {
      why = error.what();
    } catch (...) {
      why = "it threw what is no std::exception";
    }
    if (!why.empty()) verdict = {.how = Verdict::How::failed};
    lock.lock();
    if (job.ended) return;  // given up: this thread is not counted any more
    job.verdict = std::move(verdict);
    job.why = std::move(why);
    job.ended = true;
    if (--shared->open == 0) shared->done.notify_all();
  }
}

// Under the lock.
inline void Verifiers::lose_late_ones(std::vector<Job>& jobs) {
  const auto late_from = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.seconds));
  for (auto& job : jobs) {
    if (job.ended || job.thread < 0 || job.begun > late_from) continue;
    job.ended = true;
    job.verdict = {.how = Verdict::How::late};
    job.why = fmt::format("it took more than {:g} s", options_.seconds);
    --shared_->open;
    threads_.at(job.thread).detach();
    threads_.erase(job.thread);
    ++lost_;
  }
}

// Looks on for a moment before this thread sleeps: most verifiers end before it would be awake again.
inline void Verifiers::wait_awake(std::unique_lock<std::mutex>& lock) const {
  lock.unlock();
  const auto until = Clock::now() + std::chrono::microseconds(200);
  while (shared_->open > 0 && Clock::now() < until) std::this_thread::yield();
  lock.lock();
}

inline Verified Verifiers::operator()(std::vector<std::string> texts, std::vector<nlohmann::json> truths) {
  require(texts.size() == truths.size(), "rl::Verifiers", "got {} texts and {} truths", texts.size(), truths.size());
  const auto jobs = std::make_shared<std::vector<Job>>(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) (*jobs)[i].text = std::move(texts[i]), (*jobs)[i].truth = std::move(truths[i]);
  std::unique_lock lock(shared_->mutex);
  shared_->jobs = jobs;
  shared_->next = 0;
  shared_->open = static_cast<int64_t>(jobs->size());
  const auto poll = std::chrono::duration<double>(std::min(options_.seconds / 4, 0.1));
  while (shared_->open > 0) {
    if (lost_ > options_.most_lost) {
      shared_->jobs = nullptr;
      for (auto& job : *jobs) job.ended = true;
      for (auto& [number, thread] : threads_) thread.detach();  // they may run on as well
      threads_.clear();
      fail("rl::Verifiers",
           "{} verifications took more than {:g} s each and still run; expected at most {}; hint: bound the verifier's work", lost_,
           options_.seconds, options_.most_lost);
    }
    while (static_cast<int64_t>(threads_.size()) < std::min<int64_t>(options_.threads, shared_->open.load())) {
      const auto number = next_thread_++;
      threads_.emplace(number, std::thread([shared = shared_, number] { work(shared, number); }));
    }
    shared_->to_do.notify_all();
    wait_awake(lock);
    if (!shared_->done.wait_for(lock, poll, [&] { return shared_->open == 0; })) lose_late_ones(*jobs);
  }
  shared_->jobs = nullptr;
  Verified found;
  for (auto& job : *jobs) {
    found.failed += job.verdict.how == Verdict::How::failed;
    found.late += job.verdict.how == Verdict::How::late;
    if (found.why.empty()) found.why = std::move(job.why);
    found.verdicts.push_back(std::move(job.verdict));
  }
  return found;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
