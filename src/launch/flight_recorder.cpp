#include "src/launch/flight_recorder.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/error_text.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/mesh/world.hpp>

#include "src/comm/event_log.hpp"
#include "src/comm/flight/report.hpp"
#include "src/launch/environment.hpp"
#include "src/launch/place.hpp"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <functional>
#include <thread>

#include <execinfo.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dtensor::detail {

namespace {

using comm::flight::Ring;
using comm::flight::State;
constexpr int kMostRanks = 4096;  // of a process
constexpr auto kFolder = "DTENSOR_FLIGHT_RECORDER";

// What handlers of signals read: signals are of the process, and find nothing by other ways.
std::array<std::atomic<Ring*>, kMostRanks> recorded{};
std::array<char, 4096> maps_file{};  // empty: none is written

int add_recorded(Ring* ring) {
  for (int place = 0; place < kMostRanks; ++place) {
    Ring* free = nullptr;
    if (recorded[place].compare_exchange_strong(free, ring)) return place;
  }
  return -1;
}

template <class F>
void each_recorded(F f) {
  for (auto& place : recorded) {
    if (auto* ring = place.load()) f(ring->header());
  }
}

int this_thread() { return static_cast<int>(syscall(SYS_gettid)); }

// -- In handlers: only what is safe there. backtrace() is, once it has been called before.
// -----------------------------------------------------

void copy_maps() {
  if (!maps_file[0]) return;
  const int from = open("/proc/self/maps", O_RDONLY | O_CLOEXEC),
            to = open(maps_file.data(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  char bytes[4096];
  for (ssize_t n; from >= 0 && to >= 0 && (n = read(from, bytes, sizeof bytes)) > 0;) {
    if (write(to, bytes, static_cast<size_t>(n)) != n) break;
  }
  if (from >= 0) close(from);
  if (to >= 0) close(to);
}

void write_stack(comm::flight::RingHeader& header) {
  void* frames[comm::flight::kMostFrames];
  const int depth = backtrace(frames, comm::flight::kMostFrames);
  header.depth = 0;
  for (int i = 0; i < depth; ++i) header.stack[i] = reinterpret_cast<uint64_t>(frames[i]);
  header.depth = depth;
  header.stacks.fetch_add(1);
}

// A signal to the process goes on to all threads that run ranks.
void on_request(int signal, siginfo_t* info, void*) {
  const int error = errno, thread = this_thread();
  if (info->si_code != SI_TKILL) copy_maps();
  each_recorded([&](auto& header) {
    if (header.thread == thread) {
      if (!header.unwound) write_stack(header);
    } else if (info->si_code != SI_TKILL) {
      syscall(SYS_tgkill, getpid(), header.thread, signal);
    }
  });
  errno = error;
}

// SA_RESETHAND has put the default back: it ends the process when this returns.
void on_end(int signal, siginfo_t*, void*) {
  const int thread = this_thread();
  bool mine = false;
  each_recorded([&](auto& header) {
    header.signal = signal;
    if (header.thread == thread) mine = true, write_stack(header);
  });
  if (!mine && signal != SIGTERM) each_recorded([&](auto& header) { write_stack(header); });
  copy_maps();
  raise(signal);
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*), int flags) {
  struct sigaction now {};
  if (sigaction(signal, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL) return;
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  sigfillset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

bool answers_requests() {
  struct sigaction now {};
  return sigaction(SIGUSR1, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_request;
}

void handle_requests() {
  void* frame = nullptr;
  backtrace(&frame, 1);
  handle(SIGUSR1, on_request, SA_RESTART);
}

bool failed_in_a_collective(const comm::flight::Recording& recording) {
  return std::ranges::any_of(recording.events, [](const comm::Event& event) { return event.failed; });
}

bool wait_until(std::chrono::milliseconds patience, const std::function<bool()>& reached) {
  for (const auto end = std::chrono::steady_clock::now() + patience; !reached();
       std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

// Has ranks that still run write their stacks.
void ask_for_stacks(const std::vector<std::shared_ptr<Ring>>& rings) {
  handle_requests();
  if (!answers_requests()) return;
  for (const auto& ring : rings) {
    auto& header = ring->header();
    if (header.state != State::running) continue;
    const auto before = header.stacks.load();
    if (syscall(SYS_tgkill, getpid(), header.thread, SIGUSR1) != 0) continue;
    wait_until(std::chrono::milliseconds(200), [&] { return header.stacks != before; });
  }
}

// A job goes on where its events cannot be kept.
void keep_events(comm::Events& events, const std::string& folder, const World& world) {
  try {
    events.keep_in_file(comm::flight::file_of_rank(folder, world.rank()), world.rank(), world.size());
  } catch (const Error& error) {
    return say("dtensor: {}\n", error.what_without_backtrace());
  }
  const auto maps = comm::flight::maps_of_process(folder, getpid());
  if (maps.size() < maps_file.size()) *std::ranges::copy(maps, maps_file.begin()).out = 0;
  handle_requests();
  for (const int signal : {SIGTERM, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) handle(signal, on_end, static_cast<int>(SA_RESETHAND));
}

}  // namespace

FlightRecorder::FlightRecorder(World& world) {
  auto& events = world.local<comm::Events>();
  if (const auto folder = read_environment(kFolder)) {
    keep_events(events, *folder, world);
  }
  ring_ = events.log().ring;
  auto& header = ring_->header();
  header.rank = world.rank();
  header.ranks = world.size();
  header.process = getpid();
  header.thread = this_thread();
  header.answers = answers_requests();
  place_ = add_recorded(ring_.get());
}

FlightRecorder::~FlightRecorder() {
  auto running = State::running;
  ring_->header().state.compare_exchange_strong(running, State::left);
  if (place_ >= 0) recorded[place_] = nullptr;
}

void FlightRecorder::note_failure() {
  auto& header = ring_->header();
  header.unwound = 1;
  try {
    throw;
  } catch (const c10::Error& error) {
    const auto stack = addresses_of(error);
    header.depth = 0;
    std::copy_n(stack.begin(), std::min<size_t>(stack.size(), comm::flight::kMostFrames), header.stack);
    header.depth = static_cast<int32_t>(std::min<size_t>(stack.size(), comm::flight::kMostFrames));
  } catch (...) {
  }
  header.error = text_of(std::current_exception());
  copy_maps();
  header.state = State::failed;
}

void ThreadsReport::add(const std::shared_ptr<Ring>& ring) {
  std::lock_guard lock(mutex_);
  rings_.push_back(ring);
}

void ThreadsReport::explain(const Ring& failed) {
  if (!failed_in_a_collective(comm::flight::copy_of(failed))) return;
  std::unique_lock lock(mutex_);
  auto rings = rings_;
  lock.unlock();
  const auto all_ended = [&] {
    return std::ranges::all_of(rings, [](const auto& ring) { return ring->header().state != State::running; });
  };
  const bool ended = wait_until(std::chrono::seconds(1), all_ended);
  if (!ended) ask_for_stacks(rings);
  std::ranges::sort(rings, [](const auto& a, const auto& b) { return a->header().rank < b->header().rank; });
  const auto maps = comm::flight::read_text("/proc/self/maps");
  std::vector<comm::flight::Witness> witnesses;
  for (const auto& ring : rings) {
    witnesses.push_back({ring->header().rank, comm::flight::copy_of(*ring), "", false, ring.get() == &failed});
    witnesses.back().recording->maps = maps;
  }
  const auto text = "flight recorder: " + comm::flight::examine(witnesses).text;
  if (!ended) return say("{}", text);
  try {
    throw;
  } catch (c10::Error& error) {
    error.add_context(text);
  } catch (...) {
  }
}

}  // namespace dtensor::detail
