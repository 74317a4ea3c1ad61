// Every collective leaves a record. Code that counts, times or names communication observes these records.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dtensor::comm {

enum class Collective : uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, barrier };
const char* name(Collective kind);

// The cause of the library's own checks between ranks. CommDebugMode does not count them.
inline constexpr std::string_view kCheck = "dtensor::check";

struct Record {
  Collective kind{};
  uint64_t sequence = 0;    // per communicator, from 1
  int64_t bytes = 0;        // of this rank's input
  int group_size = 1;
  std::string_view group;   // the communicator's name, e.g. the mesh dimension "tp"
  std::string_view op;      // the operator that needed it, e.g. "aten::mm"; empty if none did
  bool implicit = false;    // true: the resolver decided on it; false: the user asked for it
};

// Receives every record of the thread that constructed it, until it is destroyed. Observers nest.
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

// While it lives, names the operator that this thread communicates for. The name is in the records.
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

// While it lives, names what this thread communicates for where sizes and Cause do not tell it: a unit of parameters, by its name. Ranks
// whose calls have different subjects have diverged.
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

// Communicator calls this for each collective. Nothing else does.
void issue(const Record& record);

}  // namespace dtensor::comm
