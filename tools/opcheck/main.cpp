// opcheck: proves the sharding rules against one device.
#include "tools/opcheck/examine.hpp"
#include "tools/opcheck/rehearse.hpp"

#include <dtensor/base/say.hpp>

#include <CLI/CLI.hpp>
#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include <unistd.h>

using namespace dtensor::opcheck;
using Json = nlohmann::json;

namespace {

void list(const std::vector<Operator>& operators) {
  int count = 0;
  for (const auto& op : operators) {
    if (!op.has_rule()) continue;
    fmt::print("{:<64} {:<14} {}\n", op.name, op.family, op.why);
    ++count;
  }
  fmt::print("{} operator overloads with a rule on libtorch {}\n", count, TORCH_VERSION);
}

void list_without(const std::vector<Operator>& operators) {
  int count = 0;
  for (const auto& op : operators) {
    if (op.has_rule() || op.composite) continue;
    fmt::print("{}\n", op.name);
    ++count;
  }
  fmt::print("{} operator overloads without a rule: computed on replicated operands\n", count);
}

// How far it is: a line that changes, or one in a hundred.
void show_progress(size_t done, size_t all, const std::string& name) {
  const bool terminal = isatty(STDERR_FILENO);
  if (terminal) dtensor::detail::say("\r[{}/{}] {:<60}{}", done, all, name.substr(0, 60), done == all ? "\n" : "");
  if (!terminal && done % 100 == 0) dtensor::detail::say("[{}/{}]\n", done, all);
}

int rehearse(const std::vector<Operator>& operators, bool verbose) {
  size_t calls = 0;
  const auto found = rehearse_all(operators, [&](const std::string& call) {
    ++calls;
    if (verbose) dtensor::detail::say("{}\n", call);
    if (!verbose && calls % 10000 == 0) dtensor::detail::say("[{} calls]\n", calls);
  });
  fmt::print("rehearsed operators {}, calls {}: taken {}, refused {}, not tried {}\n", found.operators, calls, found.taken, found.refused,
             found.not_tried);
  return 0;
}

struct Totals {
  int64_t operators = 0, cases = 0, wrong = 0, missed = 0, unexplained = 0, failed = 0;
};

Totals report(const std::vector<Json>& results, bool missed) {
  Totals totals;
  for (const auto& r : results) {
    const auto name = r["name"].get<std::string>();
    if (r.contains("failed")) {
      fmt::print("FAILED {}: {}\n", name, r["failed"].get<std::string>());
      ++totals.failed;
      continue;
    }
    ++totals.operators;
    totals.cases += r["cases"].get<int64_t>();
    totals.wrong += static_cast<int64_t>(r["wrong"].size());
    for (const auto& w : r["wrong"])
      fmt::print("WRONG {} {}\n      {}\n", name, w["case"].get<std::string>(), w["message"].get<std::string>());
    for (const auto& m : r["missed"]) {
      const auto reason = m["reason"].get<std::string>();
      ++totals.missed;
      totals.unexplained += reason.empty();
      if (missed && reason.empty()) {
        fmt::print("missed {} {}: {} -> {}\n", name, m["sample"].get<std::string>(), m["placements"].get<std::string>(),
                   m["legal"].get<std::string>());
      }
    }
  }
  return totals;
}

// Why operators took no sample, a line for each reason; returns how many have none.
int64_t report_unsampled(const std::vector<Operator>& operators, const std::vector<Json>& results, bool names) {
  std::map<std::string, std::vector<std::string>> reasons;
  std::set<std::string> sampled;
  for (const auto& result : results) {
    if (result.value("samples", 0) > 0) sampled.insert(result["name"].get<std::string>());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].value("samples", -1) != 0) continue;
    auto reason = why_unsampled(operators[i]);
    if (reason.empty() && sampled.count(functional_form(operators[i])))
      reason = "libtorch's own out= form does not do what its functional form does";
    reasons[reason].push_back(operators[i].name);
  }
  int64_t count = 0;
  for (const auto& [reason, some] : reasons) count += static_cast<int64_t>(some.size());
  if (count > 0) fmt::print("{} operators took no sample{}:\n", count, names ? "" : " (--verbose names them)");
  for (const auto& [reason, some] : reasons) {
    fmt::print("{:>6}  {}\n", some.size(), reason.empty() ? "no reason known" : reason);
    for (const auto& name : some) {
      if (names || reason.empty()) fmt::print("        {}\n", name);
    }
  }
  return static_cast<int64_t>(reasons[""].size());
}

// Samples that libtorch's own operator does not survive.
void report_crashing(const std::vector<Json>& results) {
  for (const auto& r : results) {
    for (const auto& text : r.value("crashing", Json::array()))
      fmt::print("libtorch's own {} crashes on plain tensors: {}\n", r["name"].get<std::string>(), text.get<std::string>());
  }
}

// Samples to which libtorch's own operator has more than one answer.
void report_left_out(const std::vector<Json>& results, bool verbose) {
  size_t count = 0, operators = 0;
  for (const auto& r : results) {
    const auto some = r.value("left_out", Json::array());
    count += some.size();
    operators += !some.empty();
    if (!verbose) continue;
    for (const auto& text : some) fmt::print("left out: {} {}\n", r["name"].get<std::string>(), text.get<std::string>());
  }
  if (count == 0) return;
  fmt::print("{} samples of {} operators left out, to which libtorch's own has more than one answer{}\n", count, operators,
             verbose ? "" : " (--verbose names them)");
}

void print_table(const Json& result) {
  if (result.contains("failed")) return;
  fmt::print("{}  [{}]  {}\n", result["name"].get<std::string>(), result["family"].get<std::string>(), result["why"].get<std::string>());
  std::string sample;
  for (const auto& row : result["rows"]) {
    if (row["sample"] != sample) fmt::print("  {}\n", sample = row["sample"].get<std::string>());
    const auto collectives = row["collectives"].get<int64_t>();
    const auto legal = row["legal"].get<std::string>();
    const auto verdict = row["verdict"].get<std::string>();
    fmt::print("    {:<44} -> {:<24} {}{}{}\n", row["placements"].get<std::string>(), row["results"].get<std::string>(),
               verdict == "right" ? "" : verdict + " ",
               collectives ? fmt::format("{} collective{}", collectives, collectives > 1 ? "s" : "") : "free",
               collectives && !legal.empty() ? ", though " + legal + " is legal" : "");
  }
}

struct Options {
  std::vector<std::string> names;
  std::string json_file;
  bool all = false, registry = false, rehearsals = false, listing = false, without = false, missed = false, verbose = false;
  size_t jobs = 2;
  Effort effort;
};

void add_options(CLI::App& app, Options& o) {
  app.add_option("operators", o.names, "operators or overloads to check, with their tables (mm, aten::add.Tensor)");
  app.add_flag("--all", o.all, "every operator that has a rule");
  app.add_flag("--registry", o.registry, "every operator in libtorch's registry that takes a tensor, with a rule or without");
  app.add_flag("--rehearse", o.rehearsals,
               "only try operators (all, or those named) on stand-ins, as before a call that communicates: for valgrind");
  app.add_flag("--list", o.listing, "list the operators that have a rule");
  app.add_flag("--without-rule", o.without, "list the operators that are computed on replicated operands");
  app.add_flag("--missed", o.missed, "print missed placements that have no known reason");
  app.add_flag("--quick", o.effort.quick, "3 ranks and one dtype only");
  app.add_option("--cases", o.effort.cases, "combinations of placements per sample and mesh, at most")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  app.add_option("--widen", o.effort.widened,
                 "samples that are made from the table's: operands that broadcast, short lengths, infinities, ...")
      ->capture_default_str()
      ->check(CLI::Range(0, 100000));
  app.add_option("--json", o.json_file, "write everything found to this file");
  app.add_option("--jobs", o.jobs, "operators at once")->capture_default_str()->check(CLI::Range(1, 64));
  app.add_flag("--verbose", o.verbose, "name the operators that took no sample and the samples left out, or each call that is rehearsed");
}

bool is_named(const Operator& op, const std::string& name) {
  return name == op.name || name == op.name.substr(op.name.find("::") + 2) || name == op.base || name == op.schema().name();
}

// What is wrong with the choice of operators; empty: nothing.
std::string fault_of(const Options& o, const std::vector<Operator>& operators) {
  for (const auto& name : o.names) {
    const bool known = std::ranges::any_of(operators, [&](const auto& op) { return is_named(op, name); });
    if (!known) return fmt::format("no such operator: {}; hint: --list and --without-rule name them", name);
  }
  if (!o.names.empty() && (o.all || o.registry || o.listing || o.without))
    return fmt::format("{} is named beside a choice of many operators; hint: give one or the other", o.names[0]);
  return {};
}

std::vector<Operator> chosen_of(const Options& o, const std::vector<Operator>& operators) {
  std::vector<Operator> chosen;
  for (const auto& op : operators) {
    const bool named = std::ranges::any_of(o.names, [&](const auto& name) { return is_named(op, name); });
    const bool of_registry = o.registry && op.name.rfind("aten::", 0) == 0 && !is_of_libtorch_itself(op);
    if (named || (o.rehearsals && o.names.empty()) || (o.all && op.has_rule()) || of_registry) chosen.push_back(op);
  }
  return chosen;
}

// Checks them and prints what was found; returns the exit status.
int check_all(const Options& o, const std::vector<Operator>& chosen) {
  std::ofstream json;
  if (!o.json_file.empty()) {
    json.open(o.json_file, std::ios::app);  // nothing is lost before there is something to write
    if (!json) return dtensor::detail::say("opcheck: cannot write {}\n", o.json_file), 2;
  }
  auto results =
      examine_apart(chosen, o.effort, o.jobs, [&](size_t done, const std::string& name) { show_progress(done, chosen.size(), name); });
  keep_simplest_misses(results);
  if (o.effort.table) {
    for (const auto& result : results) print_table(result);
  }
  const auto totals = report(results, o.missed || o.effort.table);
  if (json.is_open())
    json.close(), json.open(o.json_file), json << Json{{"libtorch", TORCH_VERSION}, {"operators", results}}.dump(1) << "\n";
  report_crashing(results);
  report_left_out(results, o.verbose);
  const auto unexplained = report_unsampled(chosen, results, o.verbose);
  fmt::print("rules {}, cases {}, wrong {}, missed {}\n", totals.operators, totals.cases, totals.wrong + totals.failed, totals.missed);
  return totals.wrong + totals.failed + unexplained > 0 ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Runs operators of libtorch on 2, 3 and 4 ranks (threads) under every combination of operand placements and compares results\n"
      "and gradients with one device. Reports what is wrong, and legal placements for which the rule moves data (missed), found by\n"
      "running the raw operator on the parts."};
  Options options;
  add_options(app, options);
  CLI11_PARSE(app, argc, argv);

  setenv("OMP_NUM_THREADS", "1", 0);
  c10::SetStackTraceFetcher([] { return std::string(); });  // many samples are refused; to collect a trace of each takes long
  const auto operators = all_operators();
  if (const auto fault = fault_of(options, operators); !fault.empty()) return dtensor::detail::say("opcheck: {}\n", fault), 2;
  if (options.listing) return list(operators), 0;
  if (options.without) return list_without(operators), 0;
  const auto chosen = chosen_of(options, operators);
  if (chosen.empty()) return dtensor::detail::say("opcheck: nothing to do; see --help\n"), 2;
  if (options.rehearsals) return rehearse(chosen, options.verbose);
  options.effort.table = !options.all && !options.registry;
  options.effort.missed = !options.registry;
  return check_all(options, chosen);
}
