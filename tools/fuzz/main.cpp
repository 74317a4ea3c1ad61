// fuzz: random programs on random meshes against one device.
#include "check.hpp"
#include "sketch.hpp"

#include <dtensor/base/say.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/Parallel.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <limits>
#include <thread>

#include <unistd.h>

namespace dtensor::fuzz {

namespace {

struct Options {
  uint64_t seed = 0;
  int64_t programs = 1000;
  int jobs = 0;
  DrawOptions draw;
  double time_limit = std::numeric_limits<double>::infinity();
  double deadline = 5;
  bool verbose = false, no_shrink = false, self_test = false;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// What a crash says: the seeds that were running.
std::array<std::atomic<uint64_t>, 64> running;
std::string reproduce_options;

void on_crash(int signal) {
  for (const auto& seed : running) {
    if (seed == 0) continue;
    const auto text = fmt::format("\ncrashed (signal {}) in one of: fuzz --seed {}{}\n", signal, seed - 1, reproduce_options);
    [[maybe_unused]] const auto written = write(2, text.data(), text.size());
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class Session {
 public:
  explicit Session(const Options& options) : options_(options) {}

  int run() {
    std::vector<std::thread> workers;
    for (int job = 0; job < options_.jobs; ++job) workers.emplace_back([this, job] { work(job); });
    const bool terminal = isatty(2) != 0;
    while (busy_ > 0 && terminal) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      dtensor::detail::say("\r{}/{} programs, {:.0f} per second, {} refused, {} mismatches ", done_.load(), options_.programs,
                 done_ / seconds_since(start_), refused_.load(), mismatches_.load());
    }
    for (auto& worker : workers) worker.join();
    if (terminal) dtensor::detail::say("\r\x1b[K");
    for (const auto& [text, times] : refusals_) fmt::print("refused {} times: {}\n", times, text);
    if (done_ < options_.programs) fmt::print("stopped after {:.0f} s\n", seconds_since(start_));
    fmt::print("programs {}, operators {}, refused {}, mismatches {}\n", done_.load(), operators_.load(), refused_.load(),
               mismatches_.load());
    return mismatches_ > 0 ? 1 : 0;
  }

 private:
  void work(int job) {
    Ranks ranks(comm::Milliseconds(static_cast<int64_t>(1000 * options_.deadline)));
    for (int64_t i = next_++; i < options_.programs && seconds_since(start_) < options_.time_limit; i = next_++) {
      const auto seed = options_.seed + static_cast<uint64_t>(i);
      running[job] = seed + 1;
      one(seed, ranks);
      ++done_;
    }
    running[job] = 0;
    --busy_;
  }

  void one(uint64_t seed, Ranks& ranks) {
    auto program = draw(seed, options_.draw);
    auto verdict = check(program, ranks);
    operators_ += program.operators();
    refused_ += static_cast<int64_t>(verdict.mesh.refused.size()) + verdict.mesh.backward_refused;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [step, text] : verdict.mesh.refused) ++refusals_[text.substr(0, text.find(';')).substr(0, 90)];
      if (verdict.mesh.backward_refused) ++refusals_["backward: " + verdict.mesh.backward_error.substr(0, 90)];
    }
    if (verdict.failure.empty()) {
      if (!options_.verbose) return;
      std::lock_guard lock(mutex_);
      fmt::print("seed {}{}: {}", seed, verdict.valid ? "" : " (not valid)", print(program, &verdict.mesh));
      return;
    }
    ++mismatches_;
    const auto before = program.operators();
    const auto failure = verdict.failure;
    if (!options_.no_shrink) program = shrink(std::move(program), verdict, ranks, 60);
    std::lock_guard lock(mutex_);
    fmt::print("\nMISMATCH in seed {}: {} operators", seed, before);
    if (!options_.no_shrink) fmt::print(" ({}), shrunk to {}", failure.substr(0, failure.find('\n')), program.operators());
    fmt::print("\n{}{}\nreproduce: fuzz --seed {}{}\n\n", print(program, &verdict.mesh), verdict.failure, seed, reproduce_options);
    std::fflush(stdout);
  }

  const Options& options_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<int64_t> next_ = 0, done_ = 0, operators_ = 0, refused_ = 0, mismatches_ = 0;
  std::atomic<int> busy_ = options_.jobs;
  std::mutex mutex_;
  std::map<std::string, int64_t> refusals_;
};

Ints parse_mesh(const std::string& text) {
  Ints sizes;
  for (size_t begin = 0; begin <= text.size(); begin = std::min(text.find('x', begin), text.size()) + 1) {
    sizes.push_back(std::atoi(text.c_str() + begin));  // 0 where there is no number
  }
  const bool fits = std::ranges::all_of(sizes, [](int64_t s) { return s > 0 && s <= Ranks::kMost; }) &&
                    !sizes.empty() && c10::multiply_integers(sizes) <= Ranks::kMost;
  if (!fits)
    throw CLI::ValidationError("--mesh",
                               fmt::format("got '{}', expected sizes such as 2x3, of at most {} ranks", text, Ranks::kMost));
  return sizes;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Draws random programs of tensor operators, runs each on one device and on a mesh whose ranks are threads, and compares\n"
      "every value and every gradient. A program that differs is shrunk and printed. The exit status is 1 if there was one.\n"
      "An operator that the library refuses by design is left out of both runs, and counted.");
  Options o;
  std::string mesh;
  auto* seed = app.add_option("--seed", o.seed, "of the first program (default 0)");
  auto* programs = app.add_option("--programs", o.programs, "how many: seeds SEED to SEED+N-1 (default 1000, or 1 with --seed)")
                       ->check(CLI::Range(1, 1000000000));
  app.add_option("--jobs", o.jobs, "programs at once (default: the number of cores)")->check(CLI::Range(1, 64));
  auto* most =
      app.add_option("--ops", o.draw.most_operators, "the most operators of a program (default 40)")->check(CLI::PositiveNumber);
  app.add_option("--mesh", mesh, "sizes of the mesh, e.g. 2x3 (default: random, of at most 8 ranks)");
  app.add_option("--time-limit", o.time_limit, "seconds after which no program is begun")->check(CLI::PositiveNumber);
  app.add_option("--deadline", o.deadline, "seconds that a collective may take (default 5)")->check(CLI::PositiveNumber);
  app.add_flag("--no-shrink", o.no_shrink, "print failing programs as they were drawn");
  app.add_flag("--verbose", o.verbose, "print every program");
  app.add_flag("--self-test", o.self_test, "draw an operator whose sharding rule is wrong, too: there must be mismatches");
  try {
    app.parse(argc, argv);
    if (!mesh.empty()) o.draw.mesh = parse_mesh(mesh);
  } catch (const CLI::ParseError& error) { return app.exit(error); }
  if (*seed && !*programs) o.programs = 1;
  if (o.jobs == 0) o.jobs = std::max(1u, std::thread::hardware_concurrency());
  o.jobs = static_cast<int>(std::min<int64_t>(o.jobs, o.programs));
  const auto wrong = wrong_operator();
  if (o.self_test) o.draw.only = &wrong;
  if (*most) reproduce_options += fmt::format(" --ops {}", o.draw.most_operators);
  if (!mesh.empty()) reproduce_options += " --mesh " + mesh;
  if (o.self_test) reproduce_options += " --self-test";
  for (const int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGBUS}) std::signal(signal, on_crash);
  at::set_num_threads(1);
  c10::SetStackTraceFetcher([] { return std::string(); });  // most of the time would go to those of attempts that do not work out
  return Session(o).run();
}

}  // namespace

}  // namespace dtensor::fuzz

int main(int argc, char** argv) { return dtensor::fuzz::run(argc, argv); }
