// The folder in which the ranks of a job keep their last events, and the report that is made of them when it fails.
#pragma once

#include <string>
#include <vector>

#include <sys/types.h>

namespace dtensor_run {

// A rank as its launcher sees it.
struct Participant {
  int rank = 0;
  pid_t pid = 0;       // 0: ended, or not known
  std::string ending;  // "was killed by signal 9 (SIGKILL, Killed)"
};

class FlightFolder {
 public:
  FlightFolder() = default;
  ~FlightFolder();
  FlightFolder(const FlightFolder&) = delete;
  FlightFolder& operator=(const FlightFolder&) = delete;

  // `wanted` is kept, else DTENSOR_FLIGHT_RECORDER's; else one in memory is removed at the end. Without a place for it there is no report.
  void open(const std::string& wanted);
  const std::string& path() const { return path_; }

  // Has those ranks write their stacks that are prepared for it.
  void ask_for_stacks(const std::vector<pid_t>& processes) const;

  // Lines for people; empty where no rank left anything.
  std::string report(const std::vector<Participant>& ranks) const;

 private:
  std::string path_;
  bool is_own_ = false;
};

// The same of what is in a folder, whoever started the job.
std::string report_of_folder(const std::string& folder);

}  // namespace dtensor_run
