// When what happened, on all ranks, as a picture.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

struct TraceOptions {
  bool operators = true;             // operators on distributed tensors too, not only collectives and scopes
  int64_t most_events = 1'000'000;   // of a rank; later ones are left out, and the file says how many
};

// Traces this rank from construction to stop(), which writes the operators, collectives and scopes of all ranks to one file, in the JSON
// that chrome://tracing and https://ui.perfetto.dev open. All ranks of the world make one and stop it, in the same order among their
// collectives.
//
//   dt::Trace trace("trace.json");
class Trace {
 public:
  // Throws on every rank where rank 0 cannot write the file.
  explicit Trace(std::string file, const TraceOptions& options = {});
  // stop(), unless an exception is under way: then this rank alone writes what it has, to FILE.rank-N.
  ~Trace() noexcept(false);
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Sends all events to rank 0, which writes the file; its clock counts, and those of other hosts are compared with it by a few messages.
  // What this communicates is not counted. Throws where rank 0 could not write all of it. Once only; later calls do nothing.
  void stop();

 private:
  class Recorder;
  std::unique_ptr<Recorder> recorder_;
};

}  // namespace dtensor

#pragma GCC visibility pop
