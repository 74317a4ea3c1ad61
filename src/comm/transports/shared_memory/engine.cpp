// How operations in shared memory make progress, are waited for, and fail.
#include "src/comm/transports/shared_memory/engine.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/spin.hpp"

#include <algorithm>
#include <utility>

namespace dtensor::comm::shared_memory {

namespace {

// How long whoever issued an operation has to wait for it before the engine's thread looks after it.
constexpr Milliseconds kGrace{1};
// How many times in a row the thread finds nothing to do before it has to be woken.
constexpr int kIdleTurns = 20;
// The longest sleep: everything that could end it rings, so this is for what nobody thought of.
constexpr Milliseconds kNap{50};

template <class T>
class Count {
 public:
  explicit Count(std::atomic<T>& counter) : counter_(counter) { counter_.fetch_add(1); }
  ~Count() { counter_.fetch_sub(1); }
  Count(const Count&) = delete;
  Count& operator=(const Count&) = delete;

 private:
  std::atomic<T>& counter_;
};

}  // namespace

class Engine::Access {
 public:
  explicit Access(Engine& engine) {
    Count wanted(engine.wanted_);
    lock_ = std::unique_lock(engine.mutex_);
  }
  std::unique_lock<std::mutex>& lock() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

Engine::Engine(std::shared_ptr<gloo::Link> link, std::shared_ptr<Arena> arena, int rank)
    : link_(std::move(link)), arena_(std::move(arena)), bell_(arena_->bell(rank)), rank_(rank) {}

void Engine::issue(const std::shared_ptr<Queue>& queue, const std::shared_ptr<Operation>& operation) {
  bool urgent = false;
  {
    Access access(*this);
    if (stopped_ || queue->broken) {
      return operation->end(failure(operation->call(), queue->name, stopped_ ? "this rank has left" : *queue->broken));
    }
    if (queue->operations.empty()) {
      active_.push_back(queue);
      pending_.store(static_cast<int>(active_.size()));
    }
    queue->operations.push_back(operation);
    progress();
    if (operation->ended()) return;
    urgent = operation->written < operation->rounds();  // the others cannot go on without the rest
  }
  wake(urgent);
}

bool Engine::can_move() {
  return std::ranges::any_of(active_, [](const std::shared_ptr<Queue>& queue) {
    return can_read(*queue) || (next_to_write(*queue) && queue->channel->all_made_room(queue->written));
  });
}

// Writes first: that is what others wait for.
bool Engine::progress(bool give_way) {
  bool moved = false;
  const auto needed = [&] { return give_way && moved && wanted_.load(std::memory_order_relaxed) > 0; };
  for (auto& queue : active_) {
    while (!queue->broken && !needed() && (write(*queue) || read(*queue))) moved = true;
  }
  take_note();
  return moved;
}

// Also wakes a thread of this rank that waits for what another one has done.
void Engine::take_note() {
  if (!std::exchange(news_, false)) return;
  const auto idle = [](const std::shared_ptr<Queue>& queue) { return queue->operations.empty(); };
  std::erase_if(active_, idle);
  pending_.store(static_cast<int>(active_.size()));
  bell_.ring();
}

// The operation that can write its next round as soon as there is room; null when none can.
Operation* Engine::next_to_write(Queue& queue) {
  for (; queue.writing < queue.operations.size(); ++queue.writing) {
    Operation& operation = *queue.operations[queue.writing];
    if (operation.written < operation.rounds()) return operation.can_write() ? &operation : nullptr;
    if (!operation.knows_rounds()) return nullptr;
  }
  return nullptr;
}

bool Engine::can_read(const Queue& queue) { return queue.read < queue.written && queue.channel->all_posted(queue.read); }

bool Engine::write(Queue& queue) {
  Operation* operation = next_to_write(queue);
  if (!operation) return false;
  Channel& channel = *queue.channel;
  if (!channel.all_made_room(queue.written)) {
    channel.want_room(true);
    if (!channel.all_made_room(queue.written)) return false;
  }
  channel.want_room(false);
  const Slot slot = channel.slot(channel.self(), queue.written);
  if (operation->written == 0) {
    operation->base = queue.written;
    *slot.call = operation->call();
  }
  operation->write(channel, operation->written++, slot);
  channel.post(queue.written++);
  return true;
}

bool Engine::read(Queue& queue) {
  if (!can_read(queue)) return false;
  Channel& channel = *queue.channel;
  const auto operation = queue.operations.front();
  if (operation->read_rounds == 0) {
    check_agreement(queue, *operation);
    operation->call().event.started();
  }
  if (queue.broken) return true;
  try {
    operation->read(channel, operation->read_rounds++, operation->base);
  } catch (const Lost& lost) {
    fail_all(queue, link_->explain(queue.ranks[lost.who], lost.why));
    return true;
  }
  channel.consume(queue.read++);
  if (operation->read_rounds < operation->rounds()) return true;
  queue.operations.pop_front();
  if (queue.writing > 0) --queue.writing;
  operation->end();
  news_ = true;
  return true;
}

// With those that have called it.
void Engine::check_agreement(Queue& queue, Operation& operation) {
  Channel& channel = *queue.channel;
  for (int who = 0; who < channel.size(); ++who) {
    if (who == channel.self() || !channel.has_posted(who, operation.base)) continue;
    const Slot theirs = channel.slot(who, operation.base);
    if (theirs.call->failures != operation.call().failures) {
      return fail_all(queue, link_->explain_out_of_step(queue.ranks[who], operation.call().failures, theirs.call->failures));
    }
    if (!theirs.call->agrees_with(operation.call())) {
      return fail_all(queue, divergence(rank_, operation.call(), queue.ranks[who], *theirs.call));
    }
    if (const auto found = operation.disagreement(channel, who, theirs)) {
      const auto& ranks = queue.ranks;
      return fail_all(queue, unequal_pieces(operation.call(), ranks[found->from], ranks[found->to], found->sent, found->expected));
    }
  }
}

// Why the queue cannot go on, if it cannot.
std::optional<std::string> Engine::obstacle(Queue& queue) {
  const Channel& channel = *queue.channel;
  const uint64_t sequence = queue.operations.front()->call().sequence;
  for (int who = 0; who < channel.size(); ++who) {
    if (who == channel.self() || (channel.has_posted(who, queue.read) && channel.has_made_room(who, queue.written))) continue;
    if (auto why = link_->obstacle({queue.ranks[who], queue.stream, sequence})) return why;
  }
  return std::nullopt;
}

bool Engine::find_failures() {
  for (auto& queue : active_) {
    Operation& first = *queue->operations.front();
    if (first.written > 0 && first.read_rounds == 0) check_agreement(*queue, first);
    if (queue->broken) continue;
    if (auto why = obstacle(*queue)) fail_all(*queue, *why);
  }
  const bool found = news_;
  take_note();
  return found;
}

void Engine::fail_all(Queue& queue, const std::string& why) {
  queue.channel->withdraw();
  queue.broken = why;
  for (auto& operation : queue.operations) operation->end(failure(operation->call(), queue.name, why));
  queue.operations.clear();
  news_ = true;
}

void Engine::give_up(Queue& queue, Operation& operation, Milliseconds deadline) {
  const auto& call = operation.call();
  if (operation.written == 0) return fail_all(queue, "the deadline passed while an earlier call was under way");
  std::vector<int> absent;
  for (int who = 0; who < queue.channel->size(); ++who) {
    if (!queue.channel->has_posted(who, operation.base)) absent.push_back(queue.ranks[who]);
  }
  queue.channel->withdraw();
  operation.end(lateness(call, queue.name, deadline, absent));
  const auto late = std::ranges::find_if(queue.operations, [&](const auto& other) { return other.get() == &operation; });
  const auto kept = std::move(*late);  // which `call` is a part of
  queue.operations.erase(late);
  fail_all(queue, call.str() + " did not complete in time");
}

void Engine::sleep(std::unique_lock<std::mutex>& lock, Clock::time_point end) {
  const uint32_t seen = bell_.rings.load();
  Count asleep(bell_.sleepers);
  if (progress() || find_failures() || active_.empty()) return;
  const auto longest = std::min<std::chrono::nanoseconds>(end - Clock::now(), kNap);
  if (longest.count() <= 0) return;
  lock.unlock();
  bell_.sleep(seen, longest);
  lock.lock();
}

void Engine::wait(Queue& queue, Operation& operation, Milliseconds deadline) {
  if (!operation.ended()) {
    const auto end = Clock::now() + deadline;
    {
      Count attending(attending_);
      Access access(*this);
      while (!operation.ended()) {
        if (progress() || stay_awake([&] { return can_move(); })) continue;
        if (Clock::now() >= end) {
          give_up(queue, operation, deadline);
          take_note();
        } else {
          sleep(access.lock(), end);
        }
      }
    }
    if (pending_.load() > 0) wake(false);
  }
  if (!operation.error().empty()) fail(name(operation.call().kind), "{}", operation.error());
}

bool Engine::poll(const Operation& operation) {
  if (operation.ended()) return true;
  Access access(*this);
  if (!progress()) find_failures();
  return operation.ended();
}

void Engine::carry_on() { wake(true); }

void Engine::interrupt() { bell_.ring_anyway(); }

void Engine::stop() {
  {
    Access access(*this);
    stopped_ = true;
    for (auto& queue : active_) fail_all(*queue, "this rank has left");
    take_note();
  }
  {
    std::lock_guard lock(wake_mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  bell_.ring_anyway();
  if (thread_.joinable()) thread_.join();
}

// Wakes the thread; unless it is urgent, only when it would not look by itself.
void Engine::wake(bool urgent) {
  if (!urgent && !dormant_.load()) return;
  {
    std::lock_guard lock(wake_mutex_);
    if (ending_) return;
    dormant_.store(false);
    urgent_ = urgent_ || urgent;
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  }
  wake_.notify_all();
}

void Engine::serve() {
  std::unique_lock lock(wake_mutex_);
  for (int idle = 0; !ending_;) {
    if (idle >= kIdleTurns) {
      dormant_.store(true);
      const bool needed = pending_.load() > 0 && attending_.load() == 0;
      if (!needed) wake_.wait(lock, [&] { return ending_ || !dormant_.load(); });
      dormant_.store(false);
      idle = 0;
    } else {
      wake_.wait_for(lock, kGrace, [&] { return ending_ || urgent_; });
    }
    urgent_ = false;
    ++idle;
    if (ending_ || pending_.load() == 0 || attending_.load() > 0) continue;
    idle = 0;
    lock.unlock();
    serve_pending();
    lock.lock();
  }
}

void Engine::serve_pending() {
  std::unique_lock lock(mutex_);
  while (!active_.empty() && attending_.load() == 0) {
    if (wanted_.load() > 0) {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else if (!progress(true)) {
      sleep(lock, Clock::time_point::max());
    }
  }
}

}  // namespace dtensor::comm::shared_memory
