// Raw operators called with unusual arguments may crash: each is examined in a process of its own. The process that starts them has
// one thread, so that no lock is held where it forks.
#include "tools/opcheck/examine.hpp"

#include <csignal>
#include <cstdio>
#include <optional>
#include <string>

#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace dtensor::opcheck {

namespace {

using Json = nlohmann::json;

constexpr unsigned kSecondsOfAStep = 300;
constexpr unsigned kSecondsOfASample = 20;  // to call libtorch's own operator once: some kernels never end on numbers that are none
constexpr rlim_t kMostMemory = rlim_t{16} << 30;  // arguments that make no sense may ask for any
constexpr size_t kMostCrashes = 40;  // of libtorch's own operator, on plain tensors

void write_all(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const auto n = write(file, text.data() + done, text.size() - done);
    if (n <= 0) return;
    done += static_cast<size_t>(n);
  }
}

[[noreturn]] void examine_here(const Operator& op, const Effort& effort, int out) {
  alarm(kSecondsOfAStep);
  const rlimit memory{kMostMemory, kMostMemory}, no_core{0, 0};
  setrlimit(RLIMIT_AS, &memory);
  setrlimit(RLIMIT_CORE, &no_core);
  // A crash can end in a hang: libraries that libtorch brings along (UCX) handle its signal.
  for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL}) std::signal(number, SIG_DFL);
  if (!std::freopen("/dev/null", "w", stderr)) _exit(1);  // what libtorch warns of is known here
  bool sampling = false;
  const auto tell = [&](const Json& known) {
    write_all(out, known.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    if (known.contains("stage")) sampling = known["stage"] == "sampling";
    alarm(sampling ? kSecondsOfASample : kSecondsOfAStep);
  };
  try {
    tell(examine(op, effort, tell));
  } catch (const std::exception& error) {
    tell({{"name", op.name}, {"failed", error.what()}});
  }
  _exit(0);
}

// One under way: what it tells, a line of JSON for each step. Where libtorch's own operator crashes on a sample, it begins again without.
class Process {
 public:
  Process(const Operator& op, const Effort& effort, size_t index) : index(index), op_(&op), effort_(effort) { start(); }

  // False at the end.
  bool read_some() {
    char buffer[1 << 16];
    const auto n = ::read(file, buffer, sizeof buffer);
    if (n > 0) text_.append(buffer, static_cast<size_t>(n));
    return n > 0;
  }

  // What was found; nothing where it has begun again.
  std::optional<Json> result() {
    ::close(file);
    int status = 0;
    waitpid(pid_, &status, 0);
    const auto [found, trying] = last_words();
    const auto failed = [&](const std::string& how) { return Json{{"name", op_->name}, {"failed", how}}; };
    if (found.is_null()) return failed("ended before it told anything");
    const auto stage = found.value("stage", "");
    const auto ending = WIFSIGNALED(status) ? std::string("ended by signal ") + strsignal(WTERMSIG(status)) : std::string("ended early");
    if (stage == "checking") return failed(ending + " at " + trying);
    if (stage == "sampling" && (effort_.crashing.size() == kMostCrashes || !effort_.crashing.insert(trying).second)) {
      return failed(ending + " where libtorch's own operator was tried on " + trying);
    }
    if (stage == "sampling") return start(), std::nullopt;
    auto result = found;
    result["crashing"] = effort_.crashing;
    return result;
  }

  size_t index;
  int file = -1;

 private:
  void start() {
    text_.clear();
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("opcheck: no pipe");
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      examine_here(*op_, effort_, ends[1]);
    }
    ::close(ends[1]);
    file = ends[0];
  }

  // The last stage that was told, and what was tried last.
  std::pair<Json, std::string> last_words() const {
    std::string trying = "nothing";
    for (auto end = text_.rfind('\n'); end != std::string::npos && end > 0;) {
      const auto before = text_.rfind('\n', end - 1);
      const auto begin = before == std::string::npos ? 0 : before + 1;
      auto line = Json::parse(text_.substr(begin, end - begin), nullptr, false);
      if (line.is_object() && !line.contains("trying")) return {line, trying};
      if (line.is_object() && trying == "nothing") trying = line["trying"];
      end = before;
    }
    return {Json(), trying};
  }

  const Operator* op_;
  Effort effort_;
  std::string text_;
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
      auto result = running[i].result();
      if (!result) continue;
      results[index] = std::move(*result);
      running.erase(running.begin() + static_cast<int64_t>(i));
      progress(++done, operators[index].name);
    }
  }
  return results;
}

}  // namespace dtensor::opcheck
