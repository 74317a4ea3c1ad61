#include "tools/fuzz_bytes/runner.hpp"

#include "tools/fuzz_bytes/mutate.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/error_text.hpp>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <system_error>
#include <typeinfo>

#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

namespace dtensor::fuzz_bytes {

namespace {

constexpr int64_t kBatch = 500;
constexpr int kSeconds = 10;                    // an input that takes longer hangs
constexpr rlim_t kMemory = rlim_t{1} << 30;     // beyond what the process has
#ifdef __SANITIZE_ADDRESS__
constexpr bool kIsSanitized = true;  // the sanitizer bounds memory itself, and tells more of a crash
#else
constexpr bool kIsSanitized = false;
#endif
constexpr size_t kMostFaults = 10;              // kinds of a target, after which it ends

// What a child leaves for its parent.
struct Page {
  std::atomic<int64_t> current, read, refused;
  char fault[1024];  // empty: a crash, or none
};

enum class Outcome { read, refused, fault };
struct Verdict {
  Outcome outcome;
  std::string text;
};

Verdict outcome_of(const Target& target, const std::string& bytes) {
  try {
    target.read(bytes);
    return {Outcome::read, ""};
  } catch (const Wrong& wrong) {
    return {Outcome::fault, wrong.text};
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const bool too_much = text.find("can't allocate memory") != text.npos || text.find("bad_alloc") != text.npos;
    return {too_much ? Outcome::fault : Outcome::refused, text};
  } catch (const std::system_error& error) {
    return {Outcome::refused, error.what()};
  } catch (const std::exception& error) {
    return {Outcome::fault, fmt::format("it threw {}: {}", c10::demangle(typeid(error).name()), error.what())};
  } catch (...) {
    return {Outcome::fault, "it threw what is no exception"};
  }
}

void on_crash(int signal) {
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void bound_memory() {
  mallopt(M_ARENA_MAX, 2);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t memory = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + kMemory;
  const rlimit limit{memory, memory};
  setrlimit(RLIMIT_AS, &limit);
}

void show_crashes() {
  static char stack[64 << 10];
  const stack_t other{stack, 0, sizeof stack};
  sigaltstack(&other, nullptr);
  void* frame = nullptr;
  backtrace(&frame, 1);
  for (const int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGBUS, SIGALRM}) {
    struct sigaction action {};
    action.sa_handler = on_crash;
    action.sa_flags = SA_ONSTACK;
    sigaction(signal, &action, nullptr);
  }
}

// Of a child: limits, and where crashes happen.
void prepare(int errors) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  dup2(nothing, 0);
  dup2(nothing, 1);
  dup2(errors, 2);
  if (!kIsSanitized) {
    bound_memory();
    show_crashes();
  }
  at::set_num_threads(1);
  c10::SetStackTraceFetcher([] { return std::string(); });
}

void set_alarm() {
  const itimerval time{{0, 0}, {kSeconds, 0}};
  setitimer(ITIMER_REAL, &time, nullptr);
}

class Run {
 public:
  Run(const Target& target, const RunOptions& options)
      : target_(target), options_(options), errors_(memfd_create("errors", MFD_CLOEXEC)),
        page_(static_cast<Page*>(mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Run() {
    munmap(page_, sizeof(Page));
    close(errors_);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Tally all() {
    get_valid_inputs();
    const auto start = std::chrono::steady_clock::now();
    const auto time_is_up = [&] {
      return options_.seconds > 0 && std::chrono::steady_clock::now() - start >= std::chrono::duration<double>(options_.seconds);
    };
    for (int64_t next = 0; next < options_.runs && !time_is_up() && kinds_.size() < kMostFaults;) {
      const auto last = std::min(options_.runs, next + kBatch);
      const auto what = in_child([&] {
        for (page_->current = next; page_->current < last && !time_is_up(); ++page_->current) one(input(page_->current));
      });
      if (!what.empty()) tell(page_->current, what);
      next = what.empty() ? last : page_->current + 1;
    }
    return {page_->read, page_->refused, faults_, kinds_.size()};
  }

  bool of_file(const std::string& file) {
    const auto bytes = read_bytes(file);
    const auto what = in_child([&] {
      const auto [outcome, text] = outcome_of(target_, bytes);
      const auto* name = outcome == Outcome::read ? "read" : outcome == Outcome::refused ? "refused: " : "FAULT: ";
      std::snprintf(page_->fault, sizeof page_->fault, "%s%s", name, text.c_str());
      if (outcome != Outcome::fault) page_->read = 1;
    });
    fmt::print("{}: {}\n", target_.name, what);
    return page_->read == 1;
  }

 private:
  // In a child, so that this process has no threads when it makes the others.
  void get_valid_inputs() {
    const auto file = scratch() + "/valid";
    const auto what = in_child([&] {
      std::string all;
      for (const auto& bytes : target_.valid()) all += bytes_of(bytes.size()) + bytes;
      write_bytes(file, all);
    });
    if (!what.empty()) fail("fuzz-bytes", "{} has no valid inputs: {}", target_.name, what);
    auto all = read_bytes(file);
    while (!all.empty()) {
      const auto size = object_of<size_t>(all.substr(0, sizeof(size_t)));
      valid_.push_back(all.substr(sizeof size, size));
      all.erase(0, sizeof size + size);
    }
  }

  std::string input(int64_t number) const {
    if (number < static_cast<int64_t>(valid_.size())) return valid_[static_cast<size_t>(number)];
    std::seed_seq seeds{options_.seed, static_cast<uint64_t>(number), static_cast<uint64_t>(std::hash<std::string>()(target_.name))};
    std::mt19937_64 random(seeds);
    return mutated(valid_, target_.words, random);
  }

  void one(const std::string& bytes) {
    set_alarm();
    const auto [outcome, text] = outcome_of(target_, bytes);
    const bool is_valid = page_->current == 0;
    if (outcome == Outcome::read) ++page_->read;
    else if (outcome == Outcome::refused && !is_valid) ++page_->refused;
    else end_with(fmt::format("{}{}", is_valid ? "a valid input: " : "", text));
  }

  [[noreturn]] void end_with(const std::string& text) {
    text.copy(page_->fault, sizeof page_->fault - 1);
    _exit(1);
  }

  // What went wrong in it; empty: nothing.
  std::string in_child(const std::function<void()>& work) {
    std::memset(page_->fault, 0, sizeof page_->fault);
    [[maybe_unused]] const int ignored = ftruncate(errors_, 0);
    lseek(errors_, 0, SEEK_SET);
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (child == 0) {
      prepare(errors_);
      set_alarm();
      try {
        work();
      } catch (...) {
        end_with(dtensor::detail::text_of(std::current_exception()));
      }
      _exit(0);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFEXITED(status)) return page_->fault[0] || WEXITSTATUS(status) == 0 ? page_->fault : said("it ended the process");
    if (WTERMSIG(status) == SIGALRM) return said(fmt::format("it takes more than {} s", kSeconds));
    return said(fmt::format("it crashed (signal {}, {})", WTERMSIG(status), strsignal(WTERMSIG(status))));
  }

  std::string said(const std::string& what) const {
    std::string text(6000, '\0');
    const auto size = pread(errors_, text.data(), text.size(), 0);
    text.resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
    return what + (text.empty() ? "" : "\n" + text);
  }

  void tell(int64_t number, const std::string& what) {
    ++faults_;
    auto kind = what.substr(0, what.find('\n'));
    std::erase_if(kind, [](char c) { return c >= '0' && c <= '9'; });
    if (const auto ours = what.find("fuzz-bytes("); ours != what.npos) kind += what.substr(ours, what.find('\n', ours) - ours);
    if (!kinds_.insert(kind).second) return;
    const auto file = fmt::format("{}/{}-{}-{}.bytes", options_.folder, target_.name, options_.seed, number);
    write_bytes(file, input(number));
    fmt::print("FAULT in {}, seed {}, input {}: {}\nreproduce: fuzz-bytes {} --file {}\n\n", target_.name, options_.seed, number, what,
               target_.name, file);
    std::fflush(stdout);
  }

  const Target& target_;
  const RunOptions options_;
  const int errors_;
  Page* const page_;
  std::vector<std::string> valid_;
  std::set<std::string> kinds_;
  int64_t faults_ = 0;
};

}  // namespace

Tally run(const Target& target, const RunOptions& options) { return Run(target, options).all(); }

bool run_file(const Target& target, const std::string& file) { return Run(target, {}).of_file(file); }

}  // namespace dtensor::fuzz_bytes
