// Events: numbering, timing and keeping them, and who sees them.
#include <dtensor/comm/event.hpp>

#include <dtensor/base/error.hpp>

#include "src/comm/describe.hpp"
#include "src/comm/event_log.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include <sys/syscall.h>
#include <unistd.h>

namespace dtensor::comm {

std::atomic<int> observers_of_operators{0};

namespace {

thread_local const Cause* innermost_cause = nullptr;
thread_local std::string_view scope;

// Writes a time of an event that is still kept, unless it is there. False: it was.
bool mark(const EventLog& log, uint64_t number, int64_t Event::*time) {
  auto& slot = log.ring->slot(number);
  if (std::atomic_ref(slot.number).load(std::memory_order_acquire) != number) return false;
  int64_t not_yet = 0;
  return std::atomic_ref(slot.*time).compare_exchange_strong(not_yet, now_ns(), std::memory_order_release);
}

}  // namespace

const char* name(Collective kind) {
  switch (kind) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::all_gather: return "all_gather";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_to_all: return "all_to_all";
    case Collective::broadcast: return "broadcast";
    case Collective::send: return "send";
    case Collective::recv: return "recv";
    case Collective::barrier: return "barrier";
    case Collective::put: return "put";
    case Collective::get: return "get";
    case Collective::signal: return "signal";
    case Collective::wait: return "wait";
  }
  return "unknown collective";
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint32_t this_thread() {
  thread_local const auto id = static_cast<uint32_t>(syscall(SYS_gettid));
  return id;
}

void EventRef::started() const {
  if (log_) mark(*log_, number_, &Event::started);
}

void EventRef::done() const {
  if (!log_) return;
  mark(*log_, number_, &Event::started);
  mark(*log_, number_, &Event::done);
}

void EventRef::failed() const {
  if (!log_) return;
  auto& slot = log_->ring->slot(number_);
  if (std::atomic_ref(slot.number).load(std::memory_order_acquire) != number_) return;
  if (std::atomic_ref(slot.done).load(std::memory_order_acquire) == 0) std::atomic_ref(slot.failed).store(true);
}

Events::Events() : log_(std::make_shared<EventLog>()) {}

void Events::keep_in_file(const std::string& file, int rank, int ranks) {
  std::lock_guard lock(log_->mutex);
  try {
    auto ring = std::make_shared<flight::Ring>(file);
    ring->header().rank = rank;
    ring->header().ranks = ranks;
    ring->header().process = getpid();
    ring->header().thread = static_cast<int32_t>(this_thread());
    char host[64] = {};
    if (gethostname(host, sizeof host - 1) == 0) ring->header().host = host;
    log_->ring = std::move(ring);
  } catch (const std::system_error& error) {
    fail("events", "the last events cannot be kept in a file: {}; hint: DTENSOR_FLIGHT_RECORDER names a folder that can be written, "
         "with {} KB of room for each rank", error.what(), flight::Ring::bytes() >> 10);
  }
}

int Events::add_group(const std::string& name, const std::vector<int>& ranks) {
  std::lock_guard lock(log_->mutex);
  auto& header = log_->ring->header();
  const int index = header.groups;
  if (index == flight::kMostGroups) return -1;
  auto& group = header.group[index];
  // Of several with one name and the same ranks the first has another key than the second, on every rank alike.
  group.key = hash_text(name, hash_counts(std::vector<int64_t>(ranks.begin(), ranks.end())));
  const auto known = [&] {
    return std::any_of(header.group, header.group + index, [&](const auto& other) { return other.key == group.key; });
  };
  while (known()) group.key = hash_text(name, group.key);
  group.size = static_cast<int32_t>(ranks.size());
  group.name = name;
  std::copy_n(ranks.begin(), std::min<size_t>(ranks.size(), flight::RingGroup::kNamed), group.ranks);
  header.groups = index + 1;
  return index;
}

EventRef Events::issue(Event event) {
  std::lock_guard lock(log_->mutex);
  auto& header = log_->ring->header();
  event.number = header.issued.load(std::memory_order_relaxed) + 1;
  event.issued = now_ns();
  event.thread = this_thread();
  flight::write_slot(log_->ring->slot(event.number), event);
  header.issued.store(event.number, std::memory_order_release);
  for (auto* observer = log_->innermost; observer; observer = observer->outer_) {
    if (event.what == Event::What::collective) observer->on_issue(event);
  }
  return {log_, event.number};
}

void Events::tell_end(const Event& event) {
  std::lock_guard lock(log_->mutex);
  for (auto* observer = log_->innermost; observer; observer = observer->outer_) {
    if (event.what == Event::What::scope || observer->of_operators_) observer->on_end(event);
  }
}

Event Events::get(uint64_t number) const {
  if (number == 0) return {};
  const auto event = flight::read_slot(log_->ring->slot(number));
  return event.number == number ? event : Event();
}

uint64_t Events::count() const { return log_->ring->header().issued.load(); }

Observer::Observer(Events events, bool of_operators) : events_(std::move(events)), of_operators_(of_operators) {
  std::lock_guard lock(events_.log_->mutex);
  outer_ = std::exchange(events_.log_->innermost, this);
  if (of_operators_) observers_of_operators.fetch_add(1);
}

Observer::~Observer() { stop_observing(); }

// Observers may end in another order than they began (a member of a longer-lived object), so unlink wherever this one is.
void Observer::stop_observing() {
  std::lock_guard lock(events_.log_->mutex);
  if (!std::exchange(observing_, false)) return;
  if (of_operators_) observers_of_operators.fetch_sub(1);
  for (Observer** link = &events_.log_->innermost; *link; link = &(*link)->outer_) {
    if (*link != this) continue;
    *link = outer_;
    return;
  }
}

Cause::Cause(std::string_view op, bool implicit, std::string_view module)
    : op_(op), module_(module), implicit_(implicit), outer_(std::exchange(innermost_cause, this)) {}

Cause::Cause(std::string_view op, bool implicit, FindModule module, const void* of)
    : op_(op), find_module_(module), of_(of), implicit_(implicit), outer_(std::exchange(innermost_cause, this)) {}

Cause::~Cause() { innermost_cause = outer_; }

std::string_view Cause::op() { return innermost_cause ? innermost_cause->op_ : std::string_view(); }
bool Cause::implicit() { return innermost_cause && innermost_cause->implicit_; }

std::string_view Cause::module() {
  for (const auto* cause = innermost_cause; cause; cause = cause->outer_) {
    const auto module = cause->find_module_ ? cause->find_module_(cause->of_) : cause->module_;
    if (!module.empty()) return module;
  }
  return scope;
}

EventScope::EventScope(Events events, std::string name)
    : events_(std::move(events)), name_(std::move(name)), outer_(std::exchange(scope, name_)) {
  event_.what = Event::What::scope;
  event_.module = name_;
  event_.issued = now_ns();
  event_.thread = this_thread();
  ref_ = events_.issue(event_);
}

EventScope::~EventScope() {
  scope = outer_;
  ref_.done();
  event_.started = event_.issued;
  event_.done = now_ns();
  events_.tell_end(event_);
}

}  // namespace dtensor::comm
