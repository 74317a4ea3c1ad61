// From the last events of all ranks to which of them holds the others up.
#pragma once

#include "src/comm/flight/describe.hpp"
#include "src/comm/flight/ring.hpp"

#include <optional>
#include <string>
#include <vector>

namespace dtensor::comm::flight {

// What is known of a rank: its events, unless there are none to read, and its process.
struct Witness {
  int rank = 0;
  std::optional<Recording> recording;
  std::string ending;      // "was killed by signal 9 (SIGKILL)"; empty: it runs, or nobody knows
  bool stopped = false;    // by SIGSTOP
  bool told = false;       // it failed first, and its error is told beside the report
};

struct Report {
  std::vector<int> behind;  // ranks that hold the others up; empty: none does
  std::string text;         // lines, of which the first says it
};

// Compares the calls of each group by their numbers: `behind` are the ranks that made another call than most, that have not made one in
// which others wait and wait nowhere themselves, or that are dead or stopped in one. Works with what there is: a rank without events is one
// that may be behind. The text has each error once, with the ranks that had it.
Report examine(const std::vector<Witness>& witnesses);

}  // namespace dtensor::comm::flight
