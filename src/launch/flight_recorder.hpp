// What a rank leaves for others to read when the job fails: its last events, which lie in a file where DTENSOR_FLIGHT_RECORDER names a
// folder, its stack and its error.
#pragma once

#include "src/comm/flight/ring.hpp"

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dtensor {
class World;
}

namespace dtensor::detail {

// Of one rank, on the thread that runs its program, as long as that runs. With a folder it catches signals that would end the process
// (SIGTERM, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL), writes the stack and lets them do it; SIGUSR1 writes the stack. Signals that the
// program handles itself are left to it.
class FlightRecorder {
 public:
  explicit FlightRecorder(World& world);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // In a handler: notes the exception that is under way, before the other ranks hear of it.
  void note_failure();

  const std::shared_ptr<comm::flight::Ring>& ring() const { return ring_; }

 private:
  std::shared_ptr<comm::flight::Ring> ring_;
  int place_ = -1;  // among those of this process
};

// The recorders of ranks that are threads of this process, and the report when one of them fails.
class ThreadsReport {
 public:
  void add(const std::shared_ptr<comm::flight::Ring>& ring);

  // Called by the rank that failed first, in a handler, after the others have heard of it: where it failed in a collective, the report is
  // added to the error or, while some rank still runs, so that launch may never return, written to stderr. Waits for the others a second at
  // most.
  void explain(const comm::flight::Ring& failed);

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<comm::flight::Ring>> rings_;
};

}  // namespace dtensor::detail
