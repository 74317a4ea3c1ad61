// How ranks meet in a collective: they compare their calls, plan tasks, run them together, and wait.
#include "src/comm/transports/threads/slot.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/copy.hpp"
#include "src/comm/failed_operators.hpp"
#include "src/comm/reduce.hpp"
#include "src/comm/spin.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace dtensor::comm::threads {

namespace {

// Below this many bytes read and written, the last rank to arrive does everything at once: that costs less than waking
// the others to share it.
constexpr int64_t kInlineBytes = 256 << 10;
// Bytes per task of a larger collective: large against the cost of claiming one, small enough to share evenly.
constexpr int64_t kTaskBytes = 128 << 10;

int64_t offset(const std::vector<int64_t>& counts, size_t position) {
  return std::accumulate(counts.begin(), counts.begin() + static_cast<int64_t>(position), int64_t{0});
}

int64_t element_size(const CallInfo& info) {
  return static_cast<int64_t>(c10::elementSize(static_cast<c10::ScalarType>(info.dtype)));
}

}  // namespace

bool Slot::post(int member, Entry entry) {
  entries_[member] = std::move(entry);
  entries_[member].posted = true;
  ++arrived_;
  if (state_.load(std::memory_order_relaxed) == kOpen) check_agreement(member);
  return arrived_ == static_cast<int>(entries_.size());
}

std::vector<int> Slot::absent() const {
  std::vector<int> result;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].posted) result.push_back(ranks_[i]);
  }
  return result;
}

void Slot::start() {
  if (state_.load(std::memory_order_relaxed) == kFailed) return;
  const auto bytes = traffic();
  const bool whole = bytes <= kInlineBytes;
  large_ = bytes >= kLargeBytes;
  for (const Entry& entry : entries_) entry.call.event.started();
  plan(whole);
  if (!whole && !tasks_.empty()) return set_state(kReady);
  for (const Task& task : tasks_) run(task);
  finish();
}

// Send and recv are the two calls of one message; everything else must be the same call on every rank.
void Slot::check_agreement(int member) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int other = static_cast<int>(i);
    if (other == member || !entries_[i].posted) continue;
    const CallInfo &mine = entries_[member].call, &theirs = entries_[i].call;
    if (mine.failures != theirs.failures) {
      const size_t who = is_out_of_step(theirs.failures, mine.failures) ? i : static_cast<size_t>(member);
      out_of_step_ = {ranks_[who], entries_[who].failed};
      return fail(departure(out_of_step_->rank, out_of_step_->why));
    }
    bool agree = mine.agrees_with(theirs);
    if (mine.kind == Collective::send || mine.kind == Collective::recv) {
      agree = mine.dtype == theirs.dtype && mine.numel == theirs.numel;
    }
    if (!agree) return fail(divergence(ranks_[member], mine, ranks_[i], theirs));
    if (mine.kind == Collective::all_to_all) {
      check_pieces(static_cast<size_t>(member), i);
      check_pieces(i, static_cast<size_t>(member));
    }
  }
}

void Slot::check_pieces(size_t from, size_t to) {
  const auto sent = entries_[from].send[to], expected = entries_[to].recv[from];
  if (sent == expected) return;
  const auto size = element_size(entries_[from].call);
  fail(unequal_pieces(entries_[from].call, ranks_[from], ranks_[to], sent * size, expected * size));
}

int64_t Slot::traffic() const {
  int64_t elements = 0;
  for (const Entry& entry : entries_) {
    if (entry.input.defined()) elements += entry.input.numel();
    if (entry.result.defined()) elements += entry.result.numel();
  }
  return elements * element_size(entries_[0].call);
}

void Slot::plan(bool whole) {
  const CallInfo& info = entries_[0].call;
  const int members = static_cast<int>(entries_.size());
  switch (info.kind) {
    case Collective::all_reduce:
      add_task({-1, -1, 0, 0, info.numel}, whole);
      break;
    case Collective::reduce_scatter:
      for (int to = 0; to < members; ++to) add_task({-1, to, offset(entries_[0].send, to), 0, entries_[0].send[to]}, whole);
      break;
    case Collective::all_gather:
      for (int to = 0; to < members; ++to) {
        for (int from = 0; from < members; ++from) {
          add_task({from, to, 0, offset(entries_[0].send, from), entries_[0].send[from]}, whole);
        }
      }
      break;
    case Collective::all_to_all:
      for (int to = 0; to < members; ++to) {
        for (int from = 0; from < members; ++from) {
          add_task({from, to, offset(entries_[from].send, to), offset(entries_[to].recv, from), entries_[to].recv[from]}, whole);
        }
      }
      break;
    case Collective::broadcast:
      for (int to = 0; to < members; ++to) add_task({info.root, to, 0, 0, info.numel}, whole);
      break;
    case Collective::send:
    case Collective::recv:
      add_task({0, 1, 0, 0, info.numel}, whole);
      break;
    default: break;  // a barrier
  }
}

void Slot::add_task(Task task, bool whole) {
  if (task.count == 0) return;
  const int64_t step = whole ? task.count : std::max<int64_t>(1, kTaskBytes / element_size(entries_[0].call));
  for (int64_t done = 0; done < task.count; done += step) {
    tasks_.push_back({task.from, task.to, task.source + done, task.destination + done, std::min(step, task.count - done)});
  }
}

void Slot::run(const Task& task) const {
  const CallInfo& info = entries_[0].call;
  const int64_t size = element_size(info), bytes = task.count * size;
  const auto input = [&](size_t member) { return static_cast<const char*>(entries_[member].in) + task.source * size; };
  const auto result = [&](size_t member) { return static_cast<char*>(entries_[member].out) + task.destination * size; };
  if (task.from >= 0) return copy_bytes(result(task.to), input(task.from), static_cast<size_t>(bytes), large_);
  c10::SmallVector<const void*, 16> inputs;
  for (size_t member = 0; member < entries_.size(); ++member) inputs.push_back(input(member));
  const size_t first = task.to < 0 ? 0 : static_cast<size_t>(task.to);
  reduce(static_cast<c10::ScalarType>(info.dtype), info.op, result(first), inputs, task.count);
  if (task.to >= 0) return;
  for (size_t member = 1; member < entries_.size(); ++member) {
    copy_bytes(result(member), result(0), static_cast<size_t>(bytes), large_);
  }
}

void Slot::run_tasks() {
  for (;;) {
    const size_t index = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (index >= tasks_.size()) return;
    run(tasks_[index]);
    if (tasks_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks_.size()) return finish();
  }
}

// Nothing is read after this, so the tensors of ranks that dropped their Work are freed here.
void Slot::finish() {
  for (Entry& entry : entries_) {
    entry.input.reset();
    entry.result.reset();
    std::exchange(entry.call.event, {}).done();
  }
  set_state(kDone);
}

void Slot::fail_if_incomplete(const std::string& why) {
  if (arrived_ < static_cast<int>(entries_.size())) fail(why);
}

void Slot::fail(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (state_.load(std::memory_order_relaxed) != kOpen) return;
    error_ = why;
    state_.store(kFailed);
    for (const Entry& entry : entries_) entry.call.event.failed();
  }
  changed_.notify_all();
}

void Slot::set_state(State state) {
  state_.store(state);
  if (sleepers_.load() == 0) return;
  { std::lock_guard lock(mutex_); }
  changed_.notify_all();
}

bool Slot::sleep_until(State at_least, std::chrono::steady_clock::time_point end) {
  const auto reached = [&] { return state_.load(std::memory_order_acquire) >= at_least; };
  if (stay_awake(reached)) return true;
  std::unique_lock lock(mutex_);
  sleepers_.fetch_add(1);
  const bool in_time = changed_.wait_until(lock, end, [&] { return state_.load() >= at_least; });
  sleepers_.fetch_sub(1);
  return in_time;
}

Slot::Outcome Slot::wait(Milliseconds deadline) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  if (!sleep_until(kReady, end)) return Outcome::late;
  if (state_.load(std::memory_order_acquire) == kReady) {
    run_tasks();
    if (!sleep_until(kDone, end)) return Outcome::late;
  }
  return state_.load(std::memory_order_acquire) == kDone ? Outcome::done : Outcome::failed;
}

bool Slot::poll() {
  if (state_.load(std::memory_order_acquire) == kReady) run_tasks();
  return state_.load(std::memory_order_acquire) >= kDone;
}

}  // namespace dtensor::comm::threads
