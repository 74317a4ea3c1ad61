// dtensor-schedule NAME --ranks P --microbatches M: prints the schedule of a pipeline and what it takes; draws, checks and converts
// schedules. It needs nothing of libtorch but the class of its errors.
#include <dtensor/base/say.hpp>
#include <dtensor/parallel/pipeline/schedules.hpp>
#include <dtensor/version.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace {

using namespace dtensor::pipelining;

struct Options {
  std::string name, check_file, svg_file, trace_file;
  PipelineSize sizes{0, 0, 0};
  std::vector<double> costs;
  double overlapped = -1;
  int memory = 0;  // 0: any
  int gathered = 0;
  bool csv = false, messages = false, reduced = false, forward = false, details = false;
};

std::string table_of_names() {
  auto table = fmt::format("\n{:<18}{:<8}{:<23}{}\n", "Schedules:", "chunks", "PyTorch's name", "what it is");
  for (const auto& schedule : named_schedules()) {
    table += fmt::format("  {:<16}{:<8}{:<23}{}\n", schedule.name, schedule.chunks == 0 ? "any" : fmt::format("{}", schedule.chunks),
                         schedule.pytorch, schedule.what);
  }
  return table +
         "\nTimes are of one stage and microbatch, in any unit. 'ideal' is what the busiest rank computes, 'bubble' the share of the "
         "makespan that it\n"
         "waits, 'peak' the activations (of one stage and microbatch each) that every rank holds at once, from F until W or B.\n"
         "\nExamples:\n"
         "  dtensor-schedule zbv --ranks 4 --microbatches 8 --svg zbv.svg\n"
         "  dtensor-schedule automatic --ranks 4 --microbatches 16 --chunks 2 --costs 1,1.3,0.8,0.1 --memory 6\n"
         "  dtensor-schedule 1f1b --ranks 4 --microbatches 8 --csv >mine.csv && dtensor-schedule --check mine.csv\n";
}

// From version 2.5 on, CLI11 breaks lines anew, and would break up the table.
template <class Formatter>
void keep_lines_of_footer(Formatter& formatter) {
  if constexpr (requires { formatter.enable_footer_formatting(false); }) formatter.enable_footer_formatting(false);
}

// CLI11's own check names the largest double in full.
CLI::Validator is_time() {
  const auto check = [](std::string& text) -> std::string {
    double time = -1;
    const bool is_number = CLI::detail::lexical_cast(text, time);
    return is_number && std::isfinite(time) && time >= 0 ? "" : fmt::format("got '{}'; expected a time, 0 or more", text);
  };
  return CLI::Validator(check, "TIME");
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("NAME", options.name, "The schedule, by a name below");
  app.add_option("--ranks", options.sizes.ranks, "Ranks of the pipeline")->check(CLI::Range(1, 1 << 20));
  app.add_option("--microbatches", options.sizes.microbatches, "Microbatches of a step")->check(CLI::Range(1, 1 << 20));
  app.add_option("--chunks", options.sizes.chunks,
                 "Stages of a rank (default: the schedule's own; 2 where any number goes, for automatic 1)")
      ->check(CLI::Range(1, 1 << 10));
  app.add_option("--costs", options.costs, "Time of F, I, W and a message: F,I,W,send (default 1,1,1,0)")
      ->delimiter(',')
      ->expected(1, 100)
      ->check(is_time());
  app.add_option("--overlapped", options.overlapped, "Time of an overlapped pair (default: F + I + W)")->check(is_time());
  app.add_option("--memory", options.memory, "Activations that a rank may hold at once; automatic finds the best of these")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--check", options.check_file,
                 "Take the schedule from this CSV file, and refuse it unless it is complete and cannot deadlock");
  app.add_flag("--forward", options.forward, "Forwards only, as in an evaluation");
  app.add_flag("--csv", options.csv, "Print the schedule in PyTorch's CSV form, and nothing else");
  app.add_flag("--messages", options.messages, "With sends and receives in the CSV")->needs("--csv");
  app.add_option("--gather", options.gathered, "With UNSHARD and RESHARD in the CSV, which keep this many stages of a rank gathered")
      ->check(CLI::Range(1, 1 << 10))
      ->needs("--csv");
  app.add_flag("--reduce", options.reduced, "With REDUCE_GRAD in the CSV, after each stage's last backward")->needs("--csv");
  app.add_flag("--details", options.details, "Print what each rank does, waits, holds and sends, too");
  app.add_option("--svg", options.svg_file, "Draw it into this file");
  app.add_option("--trace", options.trace_file, "Write it for chrome://tracing or https://ui.perfetto.dev into this file");
  app.set_version_flag("--version", DTENSOR_VERSION_TEXT);
  app.footer(table_of_names());
  keep_lines_of_footer(*app.get_formatter());
}

std::string problem_of(const Options& options) {
  if (options.name.empty() && options.check_file.empty()) return "which schedule? give a NAME, or --check FILE.csv";
  if (!options.name.empty() && !options.check_file.empty()) return "--check takes the schedule from a file; leave out the NAME";
  if (!options.costs.empty() && (options.costs.size() < 3 || options.costs.size() > 4))
    return fmt::format("--costs: got {} costs; expected three or four, F,I,W or F,I,W,send", options.costs.size());
  if (!options.check_file.empty()) return "";
  if (options.sizes.ranks == 0) return "--ranks is required";
  if (options.sizes.microbatches == 0) return "--microbatches is required";
  const int64_t chunks = std::max(options.sizes.chunks, 1), most = 1 << 22;
  if (int64_t{options.sizes.ranks} * options.sizes.microbatches * chunks > most)
    return fmt::format("{} ranks, {} microbatches and {} chunks are more than {} forwards; expected fewer", options.sizes.ranks,
                       options.sizes.microbatches, chunks, most);
  return "";
}

Costs costs_of(const Options& options) {
  Costs costs;
  if (!options.costs.empty()) costs.stage = {options.costs[0], options.costs[1], options.costs[2]};
  if (options.costs.size() > 3) costs.message = options.costs[3];
  costs.overlapped = options.overlapped;
  return costs;
}

// The schedule of a file, which has the sizes that were asked for, if any were.
Schedule read(const Options& options) {
  auto schedule = load_csv(options.check_file);
  const auto& [ranks, microbatches, chunks] = options.sizes;
  const int found = static_cast<int>(schedule.ranks.size());
  dtensor::require(ranks == 0 || ranks == found, "pipeline",
                   "'{}' has {} rows; expected {}, one for each of --ranks; hint: --ranks may be left out", options.check_file, found,
                   ranks);
  dtensor::require(chunks == 0 || int64_t{found} * chunks == schedule.stages(), "pipeline",
                   "'{}' has {} stages; expected {} ranks times {} chunks; hint: --chunks may be left out", options.check_file,
                   schedule.stages(), found, chunks);
  if (microbatches > 0) schedule.microbatches = microbatches;
  return schedule;
}

Schedule make(const Options& options) {
  if (!options.check_file.empty()) return read(options);
  const auto most = options.memory > 0 ? options.memory : std::numeric_limits<int>::max();
  const bool measured = CLI::detail::to_lower(options.name) == "automatic";
  return measured ? automatic(options.sizes, costs_of(options), most) : make_schedule(options.name, options.sizes);
}

void write_file(const std::string& file, const std::string& text) {
  std::ofstream out(file, std::ios::binary);
  out << text << std::flush;
  dtensor::require(out.good(), "pipeline", "cannot write '{}': {}; expected a file; hint: does its folder exist?", file,
                   std::strerror(errno));
}

void print_details(const Timeline& timeline) {
  fmt::print("{:<6}{:>10}{:>10}{:>10}{:>10}{:>8}{:>12}{:>10}\n", "rank", "start", "end", "busy", "bubble", "peak", "peak at I", "messages");
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    const auto& times = timeline.ranks[rank];
    fmt::print("{:<6}{:>10g}{:>10g}{:>10g}{:>10.4f}{:>8}{:>12}{:>10}\n", rank, times.start, times.end, times.busy, times.bubble(),
               times.peak, times.peak_until_input_gradient, times.messages);
  }
  fmt::print("messages: {} outputs, {} gradients\n", timeline.forward_messages, timeline.backward_messages);
}

void run(const Options& options) {
  auto schedule = make(options);
  if (options.forward) schedule = forward_only(schedule);
  const auto timeline = simulate(schedule, costs_of(options));
  dtensor::require(std::isfinite(timeline.makespan), "pipeline", "the times add up to more than a number holds; expected smaller --costs");
  for (size_t rank = 0; rank < timeline.ranks.size() && options.memory > 0; ++rank) {
    dtensor::require(timeline.ranks[rank].peak <= options.memory, "pipeline",
                     "{} holds {} activations on rank {}; expected {} at most; hint: automatic finds "
                     "a schedule that fits",
                     schedule.name, timeline.ranks[rank].peak, rank, options.memory);
  }
  if (!options.svg_file.empty()) write_file(options.svg_file, to_svg(schedule, timeline));
  if (!options.trace_file.empty()) write_file(options.trace_file, to_chrome_trace(schedule, timeline));
  if (options.csv) {
    if (options.gathered > 0) schedule = with_gathering(schedule, options.gathered);
    if (options.reduced) schedule = with_reductions(schedule);
    fmt::print("{}", to_csv(options.messages ? with_messages(schedule) : schedule));
    return;
  }
  fmt::print("{}", describe(schedule));
  if (options.details) print_details(timeline);
  fmt::print("{}\n", summary(timeline));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app(
      "dtensor-schedule NAME --ranks P --microbatches M [OPTIONS]\n"
      "Prints what each rank of a pipeline does, in order, and then how long that takes.",
      "dtensor-schedule");
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (const auto problem = problem_of(options); !problem.empty()) {
    dtensor::detail::say("dtensor-schedule: {}; try --help\n", problem);
    return 2;
  }
  try {
    run(options);
  } catch (const dtensor::Error& error) {
    dtensor::detail::say("{}\n", error.what_without_backtrace());
    return 1;
  }
  return 0;
}
