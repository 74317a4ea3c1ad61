// What a rank does, as events with a begin and an end. Everything that counts, times or names communication reads them here.
#pragma once

#include <dtensor/base/reduce_op.hpp>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::comm {

// The last four are a rank's own, on a SymmetricMemory.
enum class Collective : uint8_t {
  all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, barrier, put, get, signal, wait
};
const char* name(Collective kind);

// The cause of the checks that the library makes for itself; CommDebugMode does not count them.
inline constexpr std::string_view kCheck = "dtensor::check";

// A text of at most N - 1 bytes, in place: events are copied between processes as they are. Longer texts are cut.
template <size_t N>
struct ShortText {
  char text[N] = {};

  ShortText& operator=(std::string_view from) {
    text[from.copy(text, N - 1)] = 0;
    return *this;
  }
  operator std::string_view() const { return {text, strnlen(text, N)}; }  // of another process the zero at the end may be missing
  bool empty() const { return !text[0]; }
};

// Times are nanoseconds of the host's monotonic clock; 0: not yet.
struct Event {
  enum class What : uint8_t { collective, scope, operation };

  uint64_t number = 0;      // of the rank's events, from 1
  int64_t issued = 0;
  int64_t started = 0;      // of a collective: all ranks of the group have come, and data moves
  int64_t done = 0;
  int64_t bytes = 0;        // of this rank's input
  int64_t numel = 0;
  uint64_t sequence = 0;    // per communicator, from 1; of messages per peer and tag; of signals per memory, peer and pad
  uint64_t counts = 0;      // a hash of the counts that all ranks share (all_gather, reduce_scatter); else 0
  int32_t group_index = -1;  // in the rank's table of groups
  int32_t group_size = 1;
  int32_t root = 0;         // or the peer of a message, as a position in the group
  int32_t tag = 0;          // of a message; of a signal its pad
  uint32_t thread = 0;      // the system's number of the thread that issued it
  What what{};
  Collective kind{};
  ReduceOp reduce{};
  int8_t dtype = 0;         // c10::ScalarType
  bool implicit = false;    // true: the resolver decided it; false: the user asked for it
  bool failed = false;
  ShortText<24> group;      // the communicator's name, e.g. the mesh dimension "tp"
  ShortText<56> op;         // the operator that needed it, e.g. "aten::mm"; empty when none did. Of a scope: empty
  ShortText<86> module;     // for which module, e.g. "layers.3.mlp"; of a scope its name
};
static_assert(sizeof(Event) == 256 && std::is_trivially_copyable_v<Event>);

int64_t now_ns();
uint32_t this_thread();  // the system's number of it

struct EventLog;

// An event that is under way. Copies are the same event; transports mark what happens to it, from any thread. Only the first end counts.
class EventRef {
 public:
  EventRef() = default;
  void started() const;
  void done() const;
  void failed() const;

 private:
  friend class Events;
  EventRef(std::shared_ptr<EventLog> log, uint64_t number) : log_(std::move(log)), number_(number) {}
  std::shared_ptr<EventLog> log_;
  uint64_t number_ = 0;
};

// The events of one rank: `world.local<comm::Events>()`. The last kKept collectives and scopes are kept. Copies are the same events. Any
// thread.
class Events {
 public:
  static constexpr uint64_t kKept = 2048;

  Events();

  // Keeps them in `file` from now on, so that they can be read when this process has been killed. Before the first event. Throws where the
  // file cannot be made.
  void keep_in_file(const std::string& file, int rank, int ranks);

  // Makes a group known; the result is Event::group_index. -1: too many groups.
  int add_group(const std::string& name, const std::vector<int>& ranks);

  // Numbers and times the event, and tells observers.
  EventRef issue(Event event);
  // An operator or a scope that has ended, which only observers get.
  void tell_end(const Event& event);

  // The event with this number; of number 0 when it is not kept any more.
  Event get(uint64_t number) const;
  // How many have been issued.
  uint64_t count() const;

  EventLog& log() const { return *log_; }

 private:
  friend class Observer;
  std::shared_ptr<EventLog> log_;
};

// Sees the events of a rank, from construction to destruction, whichever of its threads they are from. Calls come one at a time.
class Observer {
 public:
  explicit Observer(Events events, bool of_operators = false);
  virtual ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

 protected:
  virtual void on_issue([[maybe_unused]] const Event& collective) {}
  virtual void on_end([[maybe_unused]] const Event& scope_or_operator) {}
  const Events& events() const { return events_; }
  // Nothing is seen after this. For destructors of derived classes.
  void stop_observing();

 private:
  friend class Events;
  Events events_;
  Observer* outer_ = nullptr;
  bool of_operators_;
  bool observing_ = true;
};

// Names the operator on whose behalf this thread communicates, and for which module, for the events within its lifetime. Without a
// module it is the one of the Cause around it.
class Cause {
 public:
  Cause(std::string_view op, bool implicit, std::string_view module = {});
  // The same where the module costs something to find: `module(of)` is called when something is communicated, which is seldom.
  using FindModule = std::string_view (*)(const void* of);
  Cause(std::string_view op, bool implicit, FindModule module, const void* of);
  ~Cause();
  Cause(const Cause&) = delete;
  Cause& operator=(const Cause&) = delete;
  static std::string_view op();
  static bool implicit();
  // Where no Cause names one, it is the innermost scope.
  static std::string_view module();

 private:
  const std::string_view op_, module_;
  const FindModule find_module_ = nullptr;
  const void* const of_ = nullptr;
  const bool implicit_;
  const Cause* const outer_;
};

// What the calls of this thread are for while it lives, where neither their sizes nor their Cause tell: ranks that call for different
// things have diverged. A unit of parameters has its name.
class Subject {
 public:
  explicit Subject(std::string_view name);
  ~Subject();
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;
  static std::string_view current();

 private:
  const std::string_view outer_;
};

// A named part of a rank's work, on this thread, from construction to destruction.
class EventScope {
 public:
  EventScope(Events events, std::string name);
  ~EventScope();
  EventScope(const EventScope&) = delete;
  EventScope& operator=(const EventScope&) = delete;

 private:
  Events events_;
  const std::string name_;
  const std::string_view outer_;
  Event event_;
  EventRef ref_;
};

}  // namespace dtensor::comm

#pragma GCC visibility pop
