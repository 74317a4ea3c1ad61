// Turns a program into ranks: one per process under a launcher, else threads of this process.
#include <dtensor/base/error.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/comm/transport_kind.hpp>
#include <dtensor/mesh/at_end.hpp>
#include <dtensor/mesh/world.hpp>

#include "src/comm/rendezvous/rendezvous.hpp"
#include "src/launch/devices.hpp"
#include "src/launch/environment.hpp"
#include "src/launch/exit.hpp"
#include "src/launch/flight_recorder.hpp"
#include "src/launch/memory.hpp"
#include "src/launch/options.hpp"
#include "src/launch/place.hpp"
#include "src/launch/seed.hpp"
#include "src/launch/single_threaded.hpp"
#include "src/launch/unfused.hpp"

#include <dtensor/base/error_text.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <thread>

#include <unistd.h>

namespace dtensor {

namespace {

using Body = std::function<void(World&)>;

void add_place_to_current() {
  try {
    throw;
  } catch (c10::Error& error) {
    detail::add_place(error);
  } catch (...) {
  }
}

// Of a launch that the program leaves the telling to: which rank failed first, and what was said of its error already.
struct Failure {
  int rank = -1, ranks = 1;
  std::string told;

  // The error with its rank, which errors of the library name themselves.
  std::string text_of(const std::exception_ptr& error) const {
    auto text = detail::text_of(error);
    const auto name = fmt::format(" (rank {})", rank);
    if (rank >= 0 && ranks > 1 && text.find(name) == std::string::npos) text += name;
    return text;
  }
};

// `on_error` says whether this rank is the first of this process to fail.
void run_rank(std::unique_ptr<comm::Transport> transport, comm::Milliseconds deadline, const Body& body,
              const std::function<bool()>& on_error, detail::ThreadsReport* report = nullptr) {
  transport->set_deadline(deadline);
  comm::Transport& reach = *transport;
  World world(std::move(transport));
  World::Use use(world);
  detail::FlightRecorder recorder(world);
  if (report) report->add(recorder.ring());
  if (world.size() > 1) detail::run_scripts_unfused();
  try {
    body(world);
    for (const auto& call : world.local<detail::AtEnd>().calls) call();
  } catch (...) {
    recorder.note_failure();
    const bool first = on_error();  // before leaving: the first error to arrive is the root cause, not an echo of this departure
    reach.leave(detail::text_of(std::current_exception()));
    add_place_to_current();
    if (first && report) report->explain(*recorder.ring());
    throw;
  }
}

// The ranks of this process that have not returned, those of them that go on, and the error that happened first. A thread cannot be ended
// from outside: who waits for one that goes on is told so.
class Running {
 public:
  Running(int ranks, Failure& failure) : failure_(failure) {
    failure_.ranks = ranks;
    for (int rank = 0; rank < ranks; ++rank) ranks_.insert(rank);
    going_on_ = ranks_;
  }

  // Called in a handler. Whether the rank is the first to fail.
  bool keep_error(int rank) {
    std::lock_guard lock(mutex_);
    going_on_.erase(rank);
    changed_.notify_all();
    if (error_) return false;
    error_ = std::current_exception();
    failure_.rank = rank;
    text_ = failure_.text_of(error_);  // now: the rank adds a report to its error while others are waited for
    return true;
  }

  void has_returned(int rank) {
    std::lock_guard lock(mutex_);
    going_on_.erase(rank);
    ranks_.erase(rank);
    changed_.notify_all();
  }

  // Returns when all have returned. Tells of an error at once where others go on for long; they notice it at their next collective.
  // `patience`: how long they may go on before the process ends; none: for ever.
  void wait(std::optional<comm::Milliseconds> patience) {
    std::unique_lock lock(mutex_);
    const auto all_back = [&] { return ranks_.empty(); };
    changed_.wait(lock, [&] { return error_ || all_back(); });
    if (!changed_.wait_for(lock, std::chrono::seconds(2), [&] { return going_on_.empty(); })) {
      failure_.told = text_;
      detail::say("error: {}; waiting for rank {}, which has not returned yet\n", text_, fmt::join(going_on_, ", "));
    }
    if (!patience) return changed_.wait(lock, all_back);
    if (changed_.wait_for(lock, *patience, all_back)) return;
    detail::say("error: rank {} has not returned for {} s after rank {} failed; the process ends\n", fmt::join(ranks_, ", "),
                std::chrono::duration_cast<std::chrono::seconds>(*patience).count(), failure_.rank);
    std::_Exit(1);
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int> ranks_, going_on_;
  std::exception_ptr error_;
  std::string text_;
  Failure& failure_;
};

// `may_end`: the process is the program's alone, and may be ended where a rank of it is stuck.
void run_threads(const LaunchOptions& options, const comm::TransportKind::MakeRank& make, const Body& body, bool may_end,
                 Failure& failure) {
  if (options.ranks == 1) {
    run_rank(make(0), options.deadline, body, [] { return true; });
    return;
  }
  detail::SingleThreaded guard;
  Running running(options.ranks, failure);
  detail::ThreadsReport report;
  std::promise<bool> all_there;  // a rank whose peers could not be started must not wait for them
  const auto begin = all_there.get_future().share();
  const auto run = [&](int rank) {
    if (!begin.get()) return;
    detail::SingleThreaded::begin_rank();
    const detail::ExitWatch watch(rank);
    try {
      run_rank(make(rank), options.deadline, body, [&] { return running.keep_error(rank); }, &report);
    } catch (...) {
      running.keep_error(rank);
    }
    running.has_returned(rank);
  };
  std::vector<std::thread> threads;
  const auto join = [&] { std::ranges::for_each(threads, &std::thread::join); };
  try {
    for (int rank = 0; rank < options.ranks; ++rank) threads.emplace_back(run, rank);
  } catch (const std::exception& error) {
    all_there.set_value(false);
    join();
    fail("launch", "only {} of {} ranks, as threads of this process, could be started: {}; hint: fewer ranks, or higher limits of this "
         "process (ulimit -a)", threads.size(), options.ranks, error.what());
  }
  all_there.set_value(true);
  running.wait(may_end ? std::optional(options.deadline) : std::nullopt);
  join();
  running.rethrow();
}

// Tells dtensor-run that this rank failed, so that it can name the first one to.
void report(int rank) {
  const auto descriptor = detail::read_environment("DTENSOR_REPORT_FD");
  if (descriptor) [[maybe_unused]] const auto written = write(std::atoi(descriptor->c_str()), &rank, sizeof rank);
}

std::string names_of_kinds_for_processes() {
  std::vector<std::string> names;
  for (const auto* kind : comm::transport_kinds()) {
    if (kind->process) names.push_back(kind->name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

void note_ignored_ranks(const LaunchOptions& options, const detail::LauncherRank& launched) {
  if (options.ranks == 1 || options.ranks == launched.size || launched.rank != 0) return;
  detail::say("dtensor: {} started {} rank{}; --ranks {} counts without a launcher only\n", launched.launcher, launched.size,
              launched.size == 1 ? "" : "s", options.ranks);
}

void run_process(const detail::LauncherRank& launched, const LaunchOptions& options, const comm::TransportKind& kind, const Body& body,
                 Failure& failure) {
  failure.ranks = launched.size;
  require(kind.process != nullptr, "launch", "{} started {} processes, which need the transport of processes; got '{}'; expected one of {}",
          launched.launcher, launched.size, kind.name, names_of_kinds_for_processes());
  comm::ProcessJob job;
  job.meeting.rank = launched.rank;
  job.meeting.size = launched.size;
  job.meeting.host = launched.host;
  job.meeting.port = launched.port;
  job.meeting.deadline = options.deadline;
  job.device = detail::device_of(launched);
  if (auto interface = detail::read_environment("GLOO_SOCKET_IFNAME")) job.meeting.interface = *interface;
  if (launched.agent_store) job.listener = comm::meet_through_agent(job.meeting);
  auto transport = kind.process(job);
  transport->set_deadline(options.deadline);
  detail::agree_on_seed(*transport);
  if (options.transport.empty()) transport = detail::with_devices(std::move(transport), launched);
  run_rank(std::move(transport), options.deadline, body, [&] { return report(failure.rank = launched.rank), true; });
}

}  // namespace

static void launch(const LaunchOptions& given, const Body& body, bool may_end, Failure& failure) {
  auto options = given;
  options.deadline = std::min<comm::Milliseconds>(options.deadline, detail::kLongestDeadline);
  require(options.ranks >= 1, "launch", "got {} ranks; expected at least 1", options.ranks);
  const auto launched = detail::find_launcher();
  const bool processes = launched && launched->size > 1;
  const auto& kind = comm::transport_kind(!options.transport.empty() ? options.transport : processes ? "shm" : "threads");
  constexpr int kMostThreads = 4096;
  require(processes || options.ranks <= kMostThreads || kind.one_for_all, "launch",
          "got {} ranks, as threads of this process; expected at most {}; hint: "
          "--transport fake has one rank of as many as are wanted",
          options.ranks, kMostThreads);
  require(processes || kind.threads, "launch", "the transport '{}' is of processes; hint: dtensor-run -n {} ./program", kind.name,
          options.ranks);
  detail::keep_freed_memory();
  if (launched && !kind.one_for_all) note_ignored_ranks(options, *launched);
  if (processes) return run_process(*launched, options, kind, body, failure);
  if (launched && !kind.one_for_all) options.ranks = 1;
  const auto make = kind.threads({options.ranks, options.deadline});
  if (kind.one_for_all) options.ranks = 1;
  run_threads(options, make, body, may_end, failure);
}

void launch(const LaunchOptions& options, const Body& body) {
  Failure failure;
  launch(options, body, false, failure);
}

int launch(int argc, char** argv, const Body& body) {
  Failure failure;
  try {
    launch(detail::parse_options(argc, argv), body, true, failure);
    return 0;
  } catch (...) {
    const auto text = failure.text_of(std::current_exception());
    if (text != failure.told) detail::say("error: {}\n", text);
    return 1;
  }
}

}  // namespace dtensor
