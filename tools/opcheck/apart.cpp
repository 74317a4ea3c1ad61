// Raw operators called with unusual arguments may crash: each is examined in a process of its own. The process that starts them has
// one thread, so that no lock is held where it forks.
#include "tools/opcheck/examine.hpp"

#include <csignal>
#include <cstdio>
#include <string>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace dtensor::opcheck {

namespace {

using Json = nlohmann::json;

// A crash can end in a hang: libraries that libtorch brings along (UCX) handle its signal.
constexpr unsigned kSecondsOfAStage = 300;

void write_all(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const auto n = write(file, text.data() + done, text.size() - done);
    if (n <= 0) return;
    done += static_cast<size_t>(n);
  }
}

[[noreturn]] void examine_here(const Operator& op, const Effort& effort, int out) {
  alarm(kSecondsOfAStage);
  if (!std::freopen("/dev/null", "w", stderr)) _exit(1);  // what libtorch warns of is known here
  const auto tell = [&](const Json& known) {
    write_all(out, known.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    alarm(kSecondsOfAStage);
  };
  try {
    tell(examine(op, effort, tell));
  } catch (const std::exception& error) {
    tell({{"name", op.name}, {"failed", error.what()}});
  }
  _exit(0);
}

// One under way: what it tells, a line of JSON for each stage, and the last one counts.
class Process {
 public:
  Process(const Operator& op, const Effort& effort, size_t index) : index(index), name_(op.name) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("opcheck: no pipe");
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      examine_here(op, effort, ends[1]);
    }
    ::close(ends[1]);
    file = ends[0];
  }

  // False at the end.
  bool read_some() {
    char buffer[1 << 16];
    const auto n = ::read(file, buffer, sizeof buffer);
    if (n > 0) text_.append(buffer, static_cast<size_t>(n));
    return n > 0;
  }

  Json result() {
    ::close(file);
    int status = 0;
    waitpid(pid_, &status, 0);
    if (!text_.empty()) text_.pop_back();
    const auto last = Json::parse(text_.substr(text_.rfind('\n') + 1), nullptr, false);
    const auto failed = [&](const std::string& how) { return Json{{"name", name_}, {"failed", how}}; };
    if (last.is_discarded()) return failed("ended before it told anything");
    if (WIFSIGNALED(status) && last.value("stage", "") == "checking") return failed(std::string("ended by signal ") + strsignal(WTERMSIG(status)));
    return last;
  }

  size_t index;
  int file = -1;

 private:
  std::string name_, text_;
  pid_t pid_ = -1;
};

}  // namespace

std::vector<Json> examine_apart(const std::vector<Operator>& operators, const Effort& effort, size_t jobs,
                                const std::function<void(size_t, const std::string&)>& progress) {
  std::vector<Json> results(operators.size());
  std::vector<Process> running;
  for (size_t next = 0, done = 0; done < operators.size();) {
    for (; running.size() < jobs && next < operators.size(); ++next) running.emplace_back(operators[next], effort, next);
    std::vector<pollfd> files;
    for (const auto& process : running) files.push_back({process.file, POLLIN, 0});
    if (poll(files.data(), files.size(), -1) < 0) continue;
    for (size_t i = files.size(); i-- > 0;) {
      if (files[i].revents == 0 || running[i].read_some()) continue;
      const auto index = running[i].index;
      results[index] = running[i].result();
      running.erase(running.begin() + static_cast<int64_t>(i));
      progress(++done, operators[index].name);
    }
  }
  return results;
}

}  // namespace dtensor::opcheck
