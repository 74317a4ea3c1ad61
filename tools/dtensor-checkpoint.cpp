// dtensor-checkpoint: looks at checkpoints, verifies, compares, converts, merges and removes them. One process; no ranks.
#include "dtensor-checkpoint.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/checkpoint/read.hpp>
#include <dtensor/parallel/patterns.hpp>
#include <dtensor/version.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include <unistd.h>

namespace dtensor_checkpoint {

std::string in_units(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

// Throws for a step that is not in its run's folder.
void check_step(const std::filesystem::path& path) {
  if (std::filesystem::exists(path)) return;
  const auto run = path.has_parent_path() ? path.parent_path().string() : ".";
  const auto steps = dt::complete_steps(run);
  dt::require(steps.empty(), kTag, "there is no '{}'; the steps of '{}': {}", path.string(), run, fmt::join(steps, ", "));
}

Index open_index(const std::string& path) {
  check_step(path);
  if (!std::filesystem::is_directory(path)) return dt::checkpoints::read_any(path);
  if (std::filesystem::exists(path + "/index.json")) return dt::checkpoints::read_index(path);
  if (const auto last = dt::last_step(path)) return dt::checkpoints::read_index(dt::step_folder(path, *last));
  return dt::checkpoints::read_any(path);
}

bool is_foreign(const Index& index) { return index.writer.contains("format"); }

// A step's own folder where a run's was given; else what was given.
static std::string name_of(const Index& index, const std::string& path) { return is_foreign(index) ? path : index.folder; }

std::string some_of(const std::vector<std::string>& names, size_t most) {
  const std::vector<std::string> first(names.begin(), names.begin() + static_cast<ptrdiff_t>(std::min(names.size(), most)));
  return fmt::format("{}{}", fmt::join(first, ", "), names.size() > most ? fmt::format(" and {} more", names.size() - most) : "");
}

Progress::Progress(int64_t all) : all_(std::max<int64_t>(all, 1)), is_seen_(isatty(STDERR_FILENO)) {}

Progress::~Progress() {
  if (is_seen_ && shown_ >= 0) dt::detail::say("\r{:<78}\r", "");
}

void Progress::operator()(int64_t done) {
  constexpr int kWidth = 50;
  const auto now = static_cast<int>(static_cast<double>(kWidth) * static_cast<double>(done) / static_cast<double>(all_));
  if (!is_seen_ || now == shown_) return;
  shown_ = now;
  dt::detail::say("\r[{:<{}}] {} of {}", std::string(static_cast<size_t>(now), '='), kWidth, in_units(done), in_units(all_));
}

namespace {

void list(const std::string& folder) {
  const auto steps = dt::complete_steps(folder);
  dt::require(!steps.empty(), kTag, "'{}' has no complete step", folder);
  fmt::print("{:>12} {:>12} {:>9} {:>6}  {:<21} {}\n", "step", "size", "tensors", "files", "written", "run");
  for (const auto step : steps) {
    try {
      const auto index = dt::checkpoints::read_index(dt::step_folder(folder, step));
      const auto of = [&](const char* key) {
        const auto found = index.writer.find(key);
        return found == index.writer.end() ? std::string() : found->second;
      };
      fmt::print("{:>12} {:>12} {:>9} {:>6}  {:<21} {}\n", step, in_units(index.bytes()), index.tensors.size(), index.files.size(),
                 of("time"), of("run"));
    } catch (const dt::Error& error) {
      fmt::print("{:>12} {}\n", step, error.what_without_backtrace());
    }
  }
}

void show(const std::string& path, const std::string& pattern) {
  const auto index = open_index(path);
  const auto any_of = [&](const auto& named) {
    return std::ranges::any_of(named, [&](const auto& entry) { return dt::detail::matches(pattern, entry.first); });
  };
  dt::require(pattern == "*" || any_of(index.tensors) || any_of(index.same_as) || any_of(index.values), kTag,
              "'{}' has no name that matches '{}'; hint: show without --only lists the names", path, pattern);
  fmt::print("{}: {}{} in {} tensors and {} files\n", name_of(index, path),
             is_foreign(index) ? "" : fmt::format("step {}, ", index.step), in_units(index.bytes()), index.tensors.size(),
             index.files.size());
  for (const auto& [key, value] : index.writer) fmt::print("  {}: {}\n", key, value);
  size_t width = 4;
  for (const auto& [name, tensor] : index.tensors) width = std::max(width, name.size());
  fmt::print("\n{:<{}}  {:<14} {:>12} {:>7}  {}\n", "name", width, "dtype", "size", "pieces", "sizes");
  for (const auto& [name, tensor] : index.tensors) {
    if (!dt::detail::matches(pattern, name)) continue;
    fmt::print("{:<{}}  {:<14} {:>12} {:>7}  [{}]\n", name, width, c10::toString(tensor.dtype), in_units(tensor.bytes()),
               tensor.pieces.size(), fmt::join(tensor.sizes, ", "));
  }
  for (const auto& [name, other] : index.same_as) {
    if (dt::detail::matches(pattern, name)) fmt::print("{:<{}}  is {}\n", name, width, other);
  }
  for (const auto& [name, value] : index.values) {
    if (dt::detail::matches(pattern, name)) fmt::print("{:<{}}  = {}\n", name, width, dt::checkpoints::text_of(value));
  }
}

int verify(const std::string& path) {
  const auto index = open_index(path);
  std::vector<std::string> faults;
  {
    Progress progress(index.bytes());
    faults = dt::checkpoints::faults_of(index, [&](int64_t done) { progress(done); });
  }
  for (const auto& fault : faults) fmt::print("{}\n", fault);
  if (!faults.empty()) return kWrong;
  const bool has_sums = std::ranges::any_of(index.tensors, [](const auto& entry) {
    return std::ranges::any_of(entry.second.pieces, [](const auto& piece) { return !piece.sums.empty(); });
  });
  fmt::print("{}: {} read, {}\n", name_of(index, path), in_units(index.bytes()),
             has_sums ? "every checksum is right" : "which have no checksums");
  return 0;
}

// The step that CheckpointManager::save_if_best keeps; nothing where there is none. Throws where that is not to be found out.
std::optional<int64_t> best_step(const std::string& folder) {
  const auto path = folder + "/best.json";
  std::error_code error;
  const bool exists = std::filesystem::exists(path, error);
  if (!exists && !error) return {};
  std::string text;
  if (std::filesystem::is_regular_file(path, error)) {
    std::ifstream file(path);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  const auto best = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  dt::require(best.is_object() && best.contains("step") && best["step"].is_number_integer(), kTag,
              "'{}' cannot be read, so it is not known which step is the best, and none is removed; hint: remove that file, or name the "
              "steps with --step",
              path);
  return best["step"].get<int64_t>();
}

struct Pruning {
  int64_t keep_last = 3, keep_every = 0;
  std::vector<int64_t> chosen;  // these alone, whatever else is said
  bool only_say = false;
};

void prune(const std::string& folder, const Pruning& wanted) {
  const auto steps = dt::complete_steps(folder);
  dt::require(!steps.empty(), kTag, "'{}' has no complete step, so there is nothing to remove; hint: name the folder of a run", folder);
  for (const auto step : wanted.chosen)
    dt::require(std::ranges::count(steps, step) > 0, kTag, "'{}' has no complete step {}; it has {}", folder, step, fmt::join(steps, ", "));
  const auto best = wanted.chosen.empty() ? best_step(folder) : std::nullopt;
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool is_chosen = std::ranges::count(wanted.chosen, steps[i]) > 0;
    const bool is_old = wanted.chosen.empty() && static_cast<int64_t>(steps.size() - i) > wanted.keep_last &&
                        (wanted.keep_every == 0 || steps[i] % wanted.keep_every != 0);
    if (!is_chosen && !is_old) continue;
    if (best == steps[i]) {
      fmt::print("{} step {}, the best by best.json\n", wanted.only_say ? "would keep" : "kept", steps[i]);
      continue;
    }
    if (!wanted.only_say) dt::remove_step(folder, steps[i]);
    fmt::print("{} step {}\n", wanted.only_say ? "would remove" : "removed", steps[i]);
  }
}

// -- The command line -------------------------------------------------------------------------------------------------------

struct Arguments {
  std::string path, other, form, part, pattern = "*";
  int64_t file_bytes = 0;
  size_t most = 20;
  Pruning pruning;
};

CLI::App* add_command(CLI::App& app, Arguments& arguments, const char* name, const char* what) {
  auto* command = app.add_subcommand(name, what);
  command->add_option("PATH", arguments.path, "which")->required();
  return command;
}

void add_pattern(CLI::App* command, Arguments& arguments) {
  command->add_option("--only", arguments.pattern, "names that match: * and ? and a|b")->capture_default_str();
}

void add_file_bytes(CLI::App* command, Arguments& arguments, const char* what) {
  command->add_option("--file-bytes", arguments.file_bytes, what)
      ->transform(CLI::AsSizeValue(true))
      ->check([](const std::string& bytes) {
        const bool is_none = bytes.starts_with('-') || bytes.find_first_not_of('0') == bytes.npos;
        return is_none ? fmt::format("got {}; expected at least one byte, such as 4GiB", bytes) : "";
      });
}

CLI::App* add_convert(CLI::App& app, Arguments& arguments) {
  auto* command = add_command(app, arguments, "convert", "write whole tensors and values in another form, where there is nothing yet");
  command->add_option("TO", arguments.other, "a new folder, of pt a new file")->required();
  command->add_option("--to", arguments.form, "dtensor: a step; hf: Hugging Face; dcp: torch.distributed.checkpoint; pt: torch.load")
      ->required()
      ->check(CLI::IsMember({"dtensor", "hf", "dcp", "pt"}));
  command->add_option(
      "--part", arguments.part,
      "take only what begins so, and leave that off. By itself 'model.' where a step with more than a model goes to hf; else "
      "all is taken");
  add_file_bytes(command, arguments, "most of a file, such as 4GiB (hf and dtensor)");
  return command;
}

CLI::App* add_merge(CLI::App& app, Arguments& arguments) {
  auto* command = add_command(app, arguments, "merge",
                              "write a checkpoint of many files as one file, or few, in the form that it has, where there is nothing yet");
  command->add_option("TO", arguments.other, "a new folder, of a file of torch.save a new file")->required();
  add_file_bytes(command, arguments, "most of a file, such as 40GiB (Hugging Face's and steps); else there is one file");
  return command;
}

CLI::App* add_prune(CLI::App& app, Arguments& arguments) {
  auto& pruning = arguments.pruning;
  auto* command = add_command(app, arguments, "prune", "remove steps, but not the one that best.json names");
  command->add_option("--keep-last", pruning.keep_last, "the newest that stay")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--keep-every", pruning.keep_every, "multiples of this stay too")->check(CLI::NonNegativeNumber);
  command->add_option("--step", pruning.chosen, "exactly these steps instead, also the best");
  command->add_flag("--dry-run", pruning.only_say, "say what would be removed");
  return command;
}

Conversion conversion_of(const Arguments& arguments, const CLI::App& command) {
  Conversion wanted{arguments.path, arguments.other, arguments.form};
  if (command.count("--part") > 0) wanted.part = arguments.part;
  if (command.count("--file-bytes") == 0) return wanted;
  if (wanted.form == "dcp" || wanted.form == "pt")
    throw CLI::ValidationError("--file-bytes", wanted.form + " is one file, whatever its size");
  wanted.file_bytes = arguments.file_bytes;
  return wanted;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Looks at checkpoints of dt::save, verifies, compares, converts, merges and removes them. PATH is a run's folder (its newest step is "
      "meant), a step's, or a file or folder of another library. Exit status: 0 all is well, 1 something is wrong or differs, 2 it was "
      "called wrongly.");
  app.set_version_flag("--version", DTENSOR_VERSION_TEXT);
  app.require_subcommand(1);
  Arguments arguments;
  auto* lists = add_command(app, arguments, "list", "the complete steps of a run");
  auto* shows = add_command(app, arguments, "show", "what is in a step: a table of its tensors and values");
  auto* verifies = add_command(app, arguments, "verify", "read everything and compare every checksum");
  auto* diffs = add_command(app, arguments, "diff", "what differs between two, the largest differences first");
  auto* converts = add_convert(app, arguments);
  auto* merges = add_merge(app, arguments);
  auto* prunes = add_prune(app, arguments);
  for (auto* command : {shows, diffs}) add_pattern(command, arguments);
  diffs->add_option("OTHER", arguments.other, "beside which")->required();
  diffs->add_option("--most", arguments.most, "tensors that differ to show")->capture_default_str();
  Conversion conversion;
  try {
    app.parse(argc, argv);
    if (*converts) conversion = conversion_of(arguments, *converts);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kMisused;
  }
  if (*lists) list(arguments.path);
  if (*shows) show(arguments.path, arguments.pattern);
  if (*verifies) return verify(arguments.path);
  if (*diffs) return diff(arguments.path, arguments.other, arguments.pattern, arguments.most);
  if (*converts) convert(conversion);
  if (*merges) merge(arguments.path, arguments.other, merges->count("--file-bytes") > 0 ? arguments.file_bytes : kOneFile);
  if (*prunes) prune(arguments.path, arguments.pruning);
  return 0;
}

}  // namespace

}  // namespace dtensor_checkpoint

int main(int argc, char** argv) try { return dtensor_checkpoint::run(argc, argv); } catch (const c10::Error& error) {
  dtensor::detail::say("{}\n", error.what_without_backtrace());
  return dtensor_checkpoint::kWrong;
} catch (const std::exception& error) {
  dtensor::detail::say("dtensor-checkpoint: {}\n", error.what());
  return dtensor_checkpoint::kWrong;
}
