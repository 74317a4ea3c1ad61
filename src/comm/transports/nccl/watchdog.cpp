// The thread that watches works on the device.
#include "src/comm/transports/nccl/watchdog.hpp"

#include <dtensor/base/error.hpp>

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace dtensor::comm::nccl {

namespace {

// How often works are looked at; the time until their memory is free again when nobody waits for them.
constexpr Milliseconds kInterval{5};
// NCCL reports a broken connection at once, the control channel tells the reason a moment later.
constexpr Milliseconds kExplanationPatience{3000};

std::string lateness(const Pending& work, Milliseconds deadline) {
  return fmt::format(
      "{} in group '{}' did not complete within {} s, and NCCL does not tell which rank did not call it; hint: a rank is stuck, "
      "far behind, or made another call, which DTENSOR_CHECK_CALLS=1 would name; raise --deadline if a rank may take that long",
      work.call.str(), work.group, static_cast<double>(deadline.count()) / 1000);
}

// All at once: each waits for the device, which is busy until all have been told.
void abort_all(const std::vector<std::weak_ptr<Channel>>& channels) {
  std::vector<std::thread> threads;
  for (const auto& weak : channels) {
    if (const auto channel = weak.lock()) threads.emplace_back([channel] { channel->abort(); });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

Watchdog::Watchdog(Control* control, const Transport& transport)
    : control_(control), transport_(transport), thread_([this] { serve(); }) {}

void Watchdog::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::add(const std::shared_ptr<Channel>& channel) {
  bool too_late = false;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(channels_, [](const auto& weak) { return weak.expired(); });
    channels_.push_back(channel);
    too_late = broken_;
  }
  if (too_late) channel->abort();
}

void Watchdog::watch(std::shared_ptr<Pending> work) {
  {
    std::lock_guard lock(mutex_);
    works_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Watchdog::check(const CallInfo& call, const std::string& group) const {
  if (!broken_) return;
  told_ = true;
  std::unique_lock lock(mutex_);
  const auto error = failure(call, group, why_);
  lock.unlock();
  fail(name(call.kind), "{}", error);
}

void Watchdog::check(const Pending& work) const {
  if (!broken_) return;
  told_ = true;
  std::unique_lock lock(mutex_);
  const auto error = work.error;
  lock.unlock();
  if (!error.empty()) fail(name(work.call.kind), "{}", error);
  check(work.call, work.group);
}

std::optional<std::string> Watchdog::obstacle(const std::vector<int>& peers, uint64_t stream, uint64_t sequence) {
  if (!control_) return std::nullopt;
  for (const int peer : peers) {
    if (auto why = control_->obstacle(peer, stream, sequence)) return why;
  }
  return std::nullopt;
}

std::string Watchdog::explain(const Pending& work, const std::string& error) {
  const auto end = Clock::now() + kExplanationPatience;
  for (; control_ && !broken_ && Clock::now() < end; std::this_thread::sleep_for(kInterval)) {
    if (auto why = obstacle(work.peers, work.stream, work.call.sequence)) return *why;
  }
  return error;
}

// The reason is there before anything ends, so that no work seems to be done.
void Watchdog::break_off(const std::string& why, bool told) {
  std::vector<std::weak_ptr<Channel>> channels;
  {
    std::lock_guard lock(mutex_);
    told_ = told_ || told;
    if (broken_) return;
    why_ = why;
    broken_ = true;
    channels = channels_;
  }
  abort_all(channels);
  changed_.notify_all();
}

std::optional<std::string> Watchdog::untold() const {
  std::lock_guard lock(mutex_);
  if (!broken_ || told_) return std::nullopt;
  return why_;
}

void Watchdog::release(Pending& work) {
  std::vector<at::Tensor> released;  // freed without the lock
  std::lock_guard lock(mutex_);
  released.swap(work.keep);
}

void Watchdog::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return broken_ || works_.empty(); });
}

void Watchdog::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopped_ || !works_.empty(); });
    if (stopped_) return;
    const Works works = works_;
    lock.unlock();
    const c10::DeviceGuard on(works.front()->channel->stream().device());  // or this thread would make itself at home on the first one
    Works ended;
    std::vector<const Channel*> busy;  // a stream does one thing after the other: only its first work may be done, or late
    for (const auto& work : works) {
      if (std::ranges::find(busy, work->channel.get()) != busy.end()) continue;
      if (is_done(work->done)) {
        release(*work);
        if (!broken_) work->call.event.done();
        work->channel.reset();  // a handle that is kept does not keep NCCL's communicator
        ended.push_back(work);
      } else {
        if (is_done(work->ready)) work->call.event.started();
        busy.push_back(work->channel.get());
        examine(*work);
      }
    }
    lock.lock();
    for (const auto& work : ended) works_.remove(work);
    if (!ended.empty()) changed_.notify_all();
    changed_.wait_for(lock, kInterval, [&] { return stopped_; });
  }
}

// A device that failed reports that at every question.
bool Watchdog::is_done(const c10::Event& event) {
  try {
    return event.query();
  } catch (const std::exception& error) {
    break_off(std::string("CUDA failed: ") + error.what());
    return true;
  }
}

void Watchdog::examine(Pending& work) {
  if (broken_) return;
  if (auto why = obstacle(work.peers, work.stream, work.call.sequence)) return break_off(*why);
  if (auto error = work.channel->error()) {
    if (is_done(work.done)) return;  // done before the connection broke
    return break_off(explain(work, *error));
  }
  const auto now = Clock::now();
  if (!work.since && is_done(work.ready)) work.since = now;
  if (!work.since || now - *work.since < transport_.deadline()) return;
  auto late = lateness(work, transport_.deadline());
  {
    std::lock_guard lock(mutex_);
    work.error = late;
    work.call.event.failed();
  }
  break_off(late);
}

}  // namespace dtensor::comm::nccl
