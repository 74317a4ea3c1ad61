// The record that every collective leaves. Everything that counts, times or names communication reads it here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dtensor::comm {

enum class Collective : uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, barrier };
const char* name(Collective kind);

// The cause of the checks that the library makes for itself; CommDebugMode does not count them.
inline constexpr std::string_view kCheck = "dtensor::check";

struct Record {
  Collective kind{};
  uint64_t sequence = 0;    // per communicator, from 1
  int64_t bytes = 0;        // of this rank's input
  int group_size = 1;
  std::string_view group;   // the communicator's name, e.g. the mesh dimension "tp"
  std::string_view op;      // the operator that needed it, e.g. "aten::mm"; empty when none did
  bool implicit = false;    // true: the resolver decided it; false: the user asked for it
};

// Sees every record of the thread that constructed it, from construction to destruction. Observers nest.
class Observer {
 public:
  Observer();
  virtual ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual void on_issue(const Record& record) = 0;

 private:
  friend void issue(const Record&);
  Observer* outer_;
};

// Names the operator on whose behalf this thread communicates, for the records made within its lifetime.
class Cause {
 public:
  Cause(std::string_view op, bool implicit);
  ~Cause();
  Cause(const Cause&) = delete;
  Cause& operator=(const Cause&) = delete;
  static std::string_view op();
  static bool implicit();

 private:
  std::string_view outer_op_;
  bool outer_implicit_;
};

// What the calls of this thread are for while it lives, where neither their sizes nor their Cause tell: ranks that call for different things
// have diverged. A unit of parameters has its name.
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

// Called by Communicator for each collective, nowhere else.
void issue(const Record& record);

}  // namespace dtensor::comm
