// The processes of one job on this host, from their start to the end of the last.
#pragma once

#include "dtensor-run-flight.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

namespace dtensor_run {

struct Job {
  int ranks = 1, nodes = 1, node = 0;
  std::string master_addr;
  int master_port = 0;
  bool prefix_output = false;
  std::string log_dir;
  double grace_seconds = 5;
  std::string recorder_folder;  // empty: one that is removed at the end
  std::vector<std::string> command;
};

class Group {
 public:
  explicit Group(Job job) : job_(std::move(job)), ranks_(job_.ranks) {}

  // Starts the ranks and waits for them. Returns the exit status.
  int run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Rank {
    pid_t pid = 0;  // 0: not started, or ended and reaped
    std::optional<int> status;  // as waitpid gives it
    int output = -1;            // read end, when output is prefixed
    std::string line;           // the last one, of which no end has come yet
  };

  bool start(int local);
  [[noreturn]] void become(int local, int output, int exec_error);
  void set_environment(int local) const;
  int rank_of(int local) const { return job_.node * job_.ranks + local; }

  void serve();
  void reap();
  void read_signals();
  void read_reports();
  void read_output(int local, bool to_the_end);
  void print_lines(int local, std::string_view text);
  void print_line(int local, const std::string& line) const;
  void escalate();
  void signal_all(int signal);
  bool running() const;
  int verdict() const;
  std::vector<pid_t> processes() const;  // of the ranks that run; 0 of others
  std::vector<Participant> participants() const;
  void expect_report();
  void print_report();
  std::optional<int> culprit() const;

  const Job job_;
  std::vector<Rank> ranks_;
  int signals_ = -1;          // signalfd
  int reports_[2] = {-1, -1};  // ranks write their number here when their program throws, before the others can notice
  std::vector<int> deaths_;    // local ranks that failed, in the order of their ends
  std::vector<int> reported_;  // local ranks that reported, in order
  int received_signal_ = 0;
  FlightFolder recorder_;
  bool told_ = false;  // the report is printed
  Clock::time_point report_at_ = Clock::time_point::max();
  enum class Stage { running, failing, terminating, killing } stage_ = Stage::running;
  Clock::time_point next_stage_ = Clock::time_point::max();
  Clock::time_point failing_until_;  // how long a rank that reported may take to end by itself
};

}  // namespace dtensor_run
