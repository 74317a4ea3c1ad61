// dtensor-run -n N PROGRAM ARGS...: starts N processes of a program as the ranks of one job, forwards signals to them, and
// ends them all when one fails.
#include <dtensor/base/say.hpp>
#include <dtensor/version.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "dtensor-run-group.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>

namespace {

constexpr int kDefaultPort = 29500;

// A port that nobody uses now, for a job on this host alone.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool bound = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (fd >= 0) close(fd);
  return bound ? ntohs(address.sin_port) : kDefaultPort;
}

struct Help : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: dtensor-run -n N [OPTIONS] PROGRAM [ARGUMENTS...]\n";
  }
};

}  // namespace

int main(int argc, char** argv) {
  dtensor_run::Job job;
  CLI::App app("Starts the ranks of a dtensor program as processes of this host.\n"
               "When a rank fails, the others get a moment to report, then SIGTERM, then SIGKILL; the exit status is the\n"
               "failed rank's (128 + the signal if one killed it).", "dtensor-run");
  app.formatter(std::make_shared<Help>());
  auto* ranks = app.add_option("-n,--ranks", job.ranks, "Processes to start on this host")->check(CLI::Range(1, 4096));
  app.add_option("--nnodes", job.nodes, "Hosts of the job; run dtensor-run on each")->check(CLI::Range(1, 65536));
  app.add_option("--node-rank", job.node, "Which of them this is, from 0")->check(CLI::Range(0, 65535));
  app.add_option("--master-addr", job.master_addr, "Address of host 0, as the others reach it (default 127.0.0.1)");
  app.add_option("--master-port", job.master_port, "Port there (default: a free one; 29500 with several hosts)")
      ->check(CLI::Range(1, 65535));
  app.add_flag("--prefix-output", job.prefix_output, "Start each line of output with the rank");
  app.add_option("--log-dir", job.log_dir, "Write each rank's output to DIR/rank-R.log instead");
  app.add_option("--flight-recorder", job.recorder_folder,
                 "Keep the ranks' last events in DIR, from which the report of a failure is made (default: in memory, "
                 "until the end)");
  std::string folder;
  auto* report = app.add_option("--report", folder, "Print the report from what a job left in DIR, or leaves there now");
  app.add_option("--grace", job.grace_seconds, "Seconds between SIGTERM and SIGKILL (default 5)")->check(CLI::Range(0.0, 3600.0));
  app.set_version_flag("--version", DTENSOR_VERSION_TEXT);
  app.prefix_command();
  CLI11_PARSE(app, argc, argv);

  if (report->count() > 0) {
    fmt::print("{}", dtensor_run::report_of_folder(folder));
    return 0;
  }
  job.command = app.remaining();
  if (!job.command.empty() && job.command.front() == "--") job.command.erase(job.command.begin());
  std::string problem;
  if (ranks->count() == 0) {
    problem = "-n N, the number of ranks, is required";
  } else if (job.command.empty()) {
    problem = "no PROGRAM to run";
  } else if (job.command.front().starts_with("-")) {
    problem = "unknown option " + job.command.front();
  } else if (job.node >= job.nodes) {
    problem = fmt::format("--node-rank {} does not fit --nnodes {}", job.node, job.nodes);
  } else if (job.nodes > 1 && job.master_addr.empty()) {
    problem = "several hosts need --master-addr";
  }
  if (!problem.empty()) {
    dtensor::detail::say("dtensor-run: {}; try --help\n", problem);
    return 2;
  }
  if (job.master_port == 0) job.master_port = job.nodes == 1 ? free_port() : kDefaultPort;
  if (job.master_addr.empty()) job.master_addr = "127.0.0.1";
  return dtensor_run::Group(std::move(job)).run();
}
