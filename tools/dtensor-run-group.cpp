// Starting, watching and ending the processes of a job.
#include "dtensor-run-group.hpp"

#include <dtensor/base/say.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace dtensor_run {

namespace {

// After a failure the other ranks notice by themselves and say so; this is how long they get.
constexpr std::chrono::milliseconds kReportTime{1500};
// The rank that was the first to say that it failed ends by itself, also where the machine is slow: its status is the job's.
constexpr std::chrono::seconds kTimeToEnd{10};
// After a rank has failed the others write their stacks, or notice and fail too, before it is said which of them is behind.
constexpr std::chrono::milliseconds kTimeToNotice{700}, kTimeForStacks{150};

sigset_t handled_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&set, signal);
  return set;
}

bool failed(int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != 0; }

std::string describe(int status) {
  if (WIFEXITED(status)) return fmt::format("exited with status {}", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return fmt::format("was killed by signal {} (SIG{}, {})", signal, sigabbrev_np(signal) ? sigabbrev_np(signal) : "?",
                     sigdescr_np(signal) ? sigdescr_np(signal) : "unknown");
}

}  // namespace

int Group::run() {
  const sigset_t handled = handled_signals();
  sigprocmask(SIG_BLOCK, &handled, nullptr);
  signals_ = signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0 || pipe2(reports_, O_NONBLOCK) != 0) {
    dtensor::detail::say("dtensor-run: {}\n", std::strerror(errno));
    return 1;
  }
  fcntl(reports_[0], F_SETFD, FD_CLOEXEC);
  if (!job_.log_dir.empty()) mkdir(job_.log_dir.c_str(), 0777);
  recorder_.open(job_.recorder_folder);
  for (int local = 0; local < job_.ranks; ++local) {
    if (start(local)) continue;
    signal_all(SIGKILL);
    for (Rank& rank : ranks_) {
      if (rank.pid > 0) waitpid(rank.pid, nullptr, 0);
    }
    return 127;
  }
  close(reports_[1]);
  serve();
  if (report_at_ != Clock::time_point::max()) print_report();
  return verdict();
}

// A pipe that closes on exec tells whether the program could be started at all.
bool Group::start(int local) {
  int exec_error[2], output[2] = {-1, -1};
  if (pipe2(exec_error, O_CLOEXEC) != 0 || (job_.prefix_output && pipe2(output, O_CLOEXEC) != 0)) {
    dtensor::detail::say("dtensor-run: cannot make a pipe: {}\n", std::strerror(errno));
    return false;
  }
  if (!job_.log_dir.empty()) {
    const auto path = fmt::format("{}/rank-{}.log", job_.log_dir, rank_of(local));
    output[1] = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (output[1] < 0) {
      dtensor::detail::say("dtensor-run: cannot write {}: {}\n", path, std::strerror(errno));
      return false;
    }
  }
  const pid_t parent = getpid(), pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    become(local, output[1], exec_error[1]);
  }
  close(exec_error[1]);
  if (output[1] >= 0) close(output[1]);
  int error = pid < 0 ? errno : 0;
  if (pid > 0) {
    ranks_[local].pid = pid;
    ranks_[local].output = output[0];
    if (output[0] >= 0) fcntl(output[0], F_SETFL, O_NONBLOCK);
    if (read(exec_error[0], &error, sizeof error) != sizeof error) error = 0;
  }
  close(exec_error[0]);
  if (error != 0) dtensor::detail::say("dtensor-run: cannot run {}: {}\n", job_.command.front(), std::strerror(error));
  return error == 0;
}

// In the child. Its own session lets signals reach what the program starts in turn, and gives it a process's share of the cores where the
// system shares them out among sessions; it cannot then read a terminal.
void Group::become(int local, int output, int exec_error) {
  setsid();
  const sigset_t handled = handled_signals();
  sigprocmask(SIG_UNBLOCK, &handled, nullptr);
  const bool reads = rank_of(local) == 0 && isatty(STDIN_FILENO) == 0;  // a file or a pipe
  const int nothing = reads ? -1 : open("/dev/null", O_RDONLY);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  if (nothing > STDERR_FILENO) close(nothing);
  if (output >= 0) {
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  }
  set_environment(local);
  std::vector<char*> arguments;
  for (const auto& argument : job_.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  const int error = errno;
  [[maybe_unused]] const auto written = write(exec_error, &error, sizeof error);
  _exit(127);
}

void Group::set_environment(int local) const {
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  set("RANK", std::to_string(rank_of(local)));
  set("WORLD_SIZE", std::to_string(job_.ranks * job_.nodes));
  set("LOCAL_RANK", std::to_string(local));
  set("LOCAL_WORLD_SIZE", std::to_string(job_.ranks));
  set("MASTER_ADDR", job_.master_addr);
  set("MASTER_PORT", std::to_string(job_.master_port));
  set("DTENSOR_REPORT_FD", std::to_string(reports_[1]));
  if (!recorder_.path().empty()) set("DTENSOR_FLIGHT_RECORDER", recorder_.path());
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  if (job_.ranks > 1) setenv("OMP_NUM_THREADS", "1", 0);
}

bool Group::running() const {
  return std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.pid > 0; });
}

void Group::serve() {
  while (running()) {
    std::vector<pollfd> entries{{signals_, POLLIN, 0}, {reports_[0], POLLIN, 0}};
    std::vector<int> local{-1, -1};
    for (int i = 0; i < job_.ranks; ++i) {
      if (ranks_[i].output < 0) continue;
      entries.push_back({ranks_[i].output, POLLIN, 0});
      local.push_back(i);
    }
    int timeout = -1;
    if (const auto next = told_ ? next_stage_ : std::min(next_stage_, report_at_); next != Clock::time_point::max()) {
      timeout = static_cast<int>(std::max<int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count()));
    }
    if (poll(entries.data(), entries.size(), timeout) < 0 && errno != EINTR) return;
    for (size_t i = 2; i < entries.size(); ++i) {
      if (entries[i].revents != 0) read_output(local[i], false);
    }
    read_signals();
    reap();
    read_reports();  // after it: what the ended ones said is then known
    if (!told_ && Clock::now() >= report_at_) print_report();
    if (Clock::now() >= next_stage_) escalate();
  }
  for (int i = 0; i < job_.ranks; ++i) read_output(i, true);
}

void Group::read_signals() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof info) == sizeof info) {
    if (info.ssi_signo == SIGCHLD) continue;
    if (info.ssi_signo == SIGUSR1) {
      recorder_.ask_for_stacks(processes());
      usleep(std::chrono::microseconds(kTimeForStacks).count());
      dtensor::detail::say("{}", recorder_.report(participants()));
      continue;
    }
    if (received_signal_ != 0) {
      stage_ = Stage::killing;
      signal_all(SIGKILL);
      continue;
    }
    received_signal_ = static_cast<int>(info.ssi_signo);
    signal_all(received_signal_);
    stage_ = Stage::terminating;
    next_stage_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(job_.grace_seconds));
  }
}

// The pipe has no writer left once all ranks have closed it; poll must not spin on that (it skips a negative descriptor).
void Group::read_reports() {
  int rank = 0;
  ssize_t n = 0;
  while ((n = read(reports_[0], &rank, sizeof rank)) == sizeof rank) {
    const int local = rank - job_.node * job_.ranks;
    if (local < 0 || local >= job_.ranks) continue;  // not a rank's own writing
    reported_.push_back(local);
    expect_report();
  }
  if (n == 0 && reports_[0] >= 0) {
    close(reports_[0]);
    reports_[0] = -1;
  }
}

void Group::reap() {
  for (int local = 0; local < job_.ranks; ++local) {
    Rank& rank = ranks_[local];
    int status = 0;
    if (rank.pid <= 0 || waitpid(rank.pid, &status, WNOHANG) != rank.pid) continue;
    kill(-rank.pid, SIGKILL);  // what it started and left behind
    rank.pid = 0;
    rank.status = status;
    if (!failed(status)) continue;
    if (received_signal_ == 0) expect_report();
    if (stage_ == Stage::running || stage_ == Stage::failing) deaths_.push_back(local);
    if (stage_ != Stage::running) continue;
    stage_ = Stage::failing;
    next_stage_ = Clock::now() + kReportTime;
    failing_until_ = Clock::now() + kTimeToEnd;
  }
}

std::vector<pid_t> Group::processes() const {
  std::vector<pid_t> pids;
  for (const Rank& rank : ranks_) pids.push_back(rank.pid);
  return pids;
}

std::vector<Participant> Group::participants() const {
  std::vector<Participant> all;
  for (int local = 0; local < job_.ranks; ++local) {
    const Rank& rank = ranks_[local];
    all.push_back({rank_of(local), rank.pid, rank.status ? describe(*rank.status) : ""});
  }
  return all;
}

// Once a rank has failed.
void Group::expect_report() {
  if (report_at_ != Clock::time_point::max()) return;
  report_at_ = Clock::now() + kTimeToNotice;
  recorder_.ask_for_stacks(processes());
}

void Group::print_report() {
  if (std::exchange(told_, true)) return;
  dtensor::detail::say("{}", recorder_.report(participants()));
}

void Group::escalate() {
  if (stage_ == Stage::failing) {
    print_report();
    if (!reported_.empty() && ranks_[reported_.front()].pid > 0 && Clock::now() < failing_until_) {
      next_stage_ = Clock::now() + kTimeForStacks;
      return;
    }
    stage_ = Stage::terminating;
    signal_all(SIGTERM);
    next_stage_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(job_.grace_seconds));
  } else {
    stage_ = Stage::killing;
    signal_all(SIGKILL);
    next_stage_ = Clock::time_point::max();
  }
}

void Group::signal_all(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.pid > 0 && kill(-rank.pid, signal) != 0) kill(rank.pid, signal);
  }
}

// A piece, unless it is for the last time: a rank that never stops writing must not keep signals waiting.
void Group::read_output(int local, bool to_the_end) {
  Rank& rank = ranks_[local];
  if (rank.output < 0) return;
  char bytes[16 << 10];
  ssize_t n = 0;
  while ((n = read(rank.output, bytes, sizeof bytes)) > 0) {
    print_lines(local, {bytes, static_cast<size_t>(n)});
    if (!to_the_end) return;
  }
  if (n < 0 && !to_the_end) return;
  close(rank.output);
  rank.output = -1;
  if (!rank.line.empty()) print_line(local, rank.line);
}

// The job goes on where nobody reads its output: fmt::print would throw there.
void Group::print_line(int local, const std::string& line) const {
  const auto text = fmt::format("[rank {}] {}\n", rank_of(local), line);
  [[maybe_unused]] const auto written = std::fwrite(text.data(), 1, text.size(), stdout);
}

void Group::print_lines(int local, std::string_view text) {
  std::string& line = ranks_[local].line;
  for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
    print_line(local, line.append(text.substr(0, end)));
    line.clear();
  }
  line += text;
  std::fflush(stdout);
}

// The rank that failed first on its own. One that died without a report was killed or exited; the others report that they
// noticed. When every failed rank reported, the first report was made before any other rank could notice.
std::optional<int> Group::culprit() const {
  const auto reported = [&](int local) { return std::ranges::find(reported_, local) != reported_.end(); };
  for (int local : deaths_) {
    if (!reported(local)) return local;
  }
  for (int local : reported_) {
    if (std::ranges::find(deaths_, local) != deaths_.end()) return local;  // else it ended by our own signal
  }
  if (deaths_.empty()) return std::nullopt;
  return deaths_.front();
}

int Group::verdict() const {
  const auto first = culprit();
  if (!first) {
    if (received_signal_ == 0) return 0;
    dtensor::detail::say("dtensor-run: ended by signal {}\n", received_signal_);
    return 128 + received_signal_;
  }
  const int status = *ranks_[*first].status;
  const bool silent = WIFEXITED(status) && std::ranges::find(reported_, *first) == reported_.end();
  dtensor::detail::say("dtensor-run: rank {} {}{}; the job was ended\n", rank_of(*first), describe(status),
                       silent ? " without an error of dt::launch (it called exit(), or main returned that)" : "");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace dtensor_run
