// dtensor-checkpoint: looks at checkpoints, verifies, compares, converts and removes them. One process; no ranks.
#include <dtensor/base/error.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/checkpoint/read.hpp>
#include <dtensor/parallel/patterns.hpp>
#include <dtensor/version.hpp>

#include <ATen/ATen.h>
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <filesystem>

#include <unistd.h>

namespace {

namespace dt = dtensor;
using dt::checkpoints::Index;

// Exit statuses: 0 all is well; 1 something is wrong or differs; 2 it was called wrongly.
constexpr int kWrong = 1;

std::string in_units(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

// A step's folder, a run's folder (its newest step), or a file or folder of another library.
Index open_index(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return dt::checkpoints::read_any(path);
  if (std::filesystem::exists(path + "/index.json")) return dt::checkpoints::read_index(path);
  if (const auto last = dt::last_step(path)) return dt::checkpoints::read_index(dt::step_folder(path, *last));
  return dt::checkpoints::read_any(path);
}

void list(const std::string& folder) {
  const auto steps = dt::complete_steps(folder);
  dt::require(!steps.empty(), "dtensor-checkpoint", "'{}' has no complete step", folder);
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
  fmt::print("{}: step {}, {} in {} tensors and {} files\n", index.folder, index.step, in_units(index.bytes()), index.tensors.size(),
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
  for (const auto& [name, other] : index.same_as) fmt::print("{:<{}}  is {}\n", name, width, other);
  for (const auto& [name, value] : index.values) {
    if (dt::detail::matches(pattern, name)) fmt::print("{:<{}}  = {}\n", name, width, dt::checkpoints::text_of(value));
  }
}

// Draws how far something is, on a terminal only.
class Progress {
 public:
  explicit Progress(int64_t all) : all_(std::max<int64_t>(all, 1)), is_seen_(isatty(STDERR_FILENO)) {}
  ~Progress() {
    if (is_seen_ && shown_ >= 0) dt::detail::say("\r{:<70}\r", "");
  }
  void operator()(int64_t done) {
    const auto now = static_cast<int>(50 * done / all_);
    if (!is_seen_ || now == shown_) return;
    shown_ = now;
    dt::detail::say("\r[{:<50}] {} of {}", std::string(static_cast<size_t>(now), '='), in_units(done), in_units(all_));
  }

 private:
  const int64_t all_;
  const bool is_seen_;
  int shown_ = -1;
};

int verify(const std::string& path) {
  const auto index = open_index(path);
  Progress progress(index.bytes());
  const auto faults = dt::checkpoints::faults_of(index, [&](int64_t done) { progress(done); });
  for (const auto& fault : faults) fmt::print("{}\n", fault);
  if (!faults.empty()) return kWrong;
  const bool has_sums = std::ranges::any_of(index.tensors, [](const auto& entry) {
    return std::ranges::any_of(entry.second.pieces, [](const auto& piece) { return !piece.sums.empty(); });
  });
  fmt::print("{}: {} read, {}\n", index.folder, in_units(index.bytes()), has_sums ? "every checksum is right" : "which have no checksums");
  return 0;
}

// The largest difference of two tensors of one size, as doubles; complex ones by their absolute value.
double difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  const auto wide = a.is_complex() ? at::kComplexDouble : at::kDouble;
  const auto apart = (a.to(wide) - b.to(wide)).abs();
  return at::where(a.to(wide).eq(b.to(wide)) | (a.isnan() & b.isnan()), at::zeros_like(apart), apart).max().item<double>();
}

int diff(const std::string& first, const std::string& second, const std::string& pattern, size_t shown) {
  const auto a = open_index(first), b = open_index(second);
  std::vector<std::pair<double, std::string>> apart;
  bool any = false;
  const auto say = [&](const std::string& line) {
    any = true;
    fmt::print("{}\n", line);
  };
  Progress progress(a.bytes());
  int64_t done = 0;
  for (const auto& [name, tensor] : a.tensors) {
    if (!dt::detail::matches(pattern, name)) continue;
    const auto* other = b.find(name);
    if (!other) say(fmt::format("only in {}: {}", first, name));
    else if (other->sizes != tensor.sizes)
      say(fmt::format("{}: sizes [{}] and [{}]", name, fmt::join(tensor.sizes, ", "), fmt::join(other->sizes, ", ")));
    else {
      if (other->dtype != tensor.dtype) say(fmt::format("{}: {} and {}", name, c10::toString(tensor.dtype), c10::toString(other->dtype)));
      const double largest = difference(dt::checkpoints::read_tensor(a, name), dt::checkpoints::read_tensor(b, name));
      if (largest != 0) apart.emplace_back(largest, name);
    }
    progress(done += tensor.bytes());
  }
  for (const auto& [name, tensor] : b.tensors) {
    if (dt::detail::matches(pattern, name) && !a.find(name)) say(fmt::format("only in {}: {}", second, name));
  }
  for (const auto& [name, value] : a.values) {
    const auto found = b.values.find(name);
    if (dt::detail::matches(pattern, name) && found != b.values.end() && !(found->second == value))
      say(fmt::format("{}: {} and {}", name, dt::checkpoints::text_of(value), dt::checkpoints::text_of(found->second)));
  }
  std::ranges::sort(apart, std::ranges::greater());
  for (size_t i = 0; i < std::min(shown, apart.size()); ++i) say(fmt::format("{:.3e}  {}", apart[i].first, apart[i].second));
  if (apart.size() > shown) fmt::print("and {} tensors more that differ less\n", apart.size() - shown);
  if (!any) fmt::print("no difference\n");
  return any ? kWrong : 0;
}

// Whole tensors into a folder of safetensors files. `part`: what names begin with, which is left off ("model.").
void merge(const std::string& from, const std::string& to, const std::string& part, int64_t file_bytes) {
  const auto index = open_index(from);
  dt::checkpoints::Source source;
  int64_t bytes = 0, done = 0;
  for (const auto& [name, tensor] : index.tensors) {
    if (name.rfind(part, 0) != 0) continue;
    source.tensors.push_back({name.substr(part.size()), tensor.dtype, tensor.sizes});
    bytes += tensor.bytes();
  }
  for (const auto& [name, other] : index.same_as) {
    if (name.rfind(part, 0) == 0 && other.rfind(part, 0) == 0) source.same_as[name.substr(part.size())] = other.substr(part.size());
  }
  dt::require(!source.tensors.empty(), "dtensor-checkpoint", "'{}' has no tensor whose name begins with '{}'; hint: show lists the names",
              from, part);
  Progress progress(bytes);
  source.get = [&](const std::string& name) {
    auto tensor = dt::checkpoints::read_tensor(index, part + name);
    progress(done += static_cast<int64_t>(tensor.nbytes()));
    return tensor;
  };
  dt::checkpoints::write_huggingface(to, source, {.file_bytes = file_bytes});
  fmt::print("{}: {} tensors, {}\n", to, source.tensors.size(), in_units(bytes));
}

void prune(const std::string& folder, int64_t keep_last, int64_t keep_every, const std::vector<int64_t>& chosen, bool only_say) {
  const auto steps = dt::complete_steps(folder);
  for (const auto step : chosen)
    dt::require(std::ranges::count(steps, step) > 0, "dtensor-checkpoint", "'{}' has no complete step {}", folder, step);
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool is_chosen = std::ranges::count(chosen, steps[i]) > 0;
    const bool is_old =
        chosen.empty() && static_cast<int64_t>(steps.size() - i) > keep_last && (keep_every == 0 || steps[i] % keep_every != 0);
    if (!is_chosen && !is_old) continue;
    if (!only_say) dt::remove_step(folder, steps[i]);
    fmt::print("{} step {}\n", only_say ? "would remove" : "removed", steps[i]);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app(
      "Looks at checkpoints of dt::save, verifies, compares, merges and removes them. PATH is a run's folder (its newest step is meant), a "
      "step's, or a file or folder of another library. Exit status: 0 all is well, 1 something is wrong or differs.");
  app.set_version_flag("--version", DTENSOR_VERSION_TEXT);
  app.require_subcommand(1);
  std::string path, other, pattern = "*", part = "model.";
  size_t shown = 20;
  int64_t keep_last = 3, keep_every = 0;
  double file_gib = 5;
  bool only_say = false;
  std::vector<int64_t> steps;
  auto* lists = app.add_subcommand("list", "the complete steps of a run");
  auto* shows = app.add_subcommand("show", "what is in a step: a table of its tensors and values");
  auto* verifies = app.add_subcommand("verify", "read everything and compare every checksum");
  auto* diffs = app.add_subcommand("diff", "what differs between two, the largest differences first");
  auto* merges = app.add_subcommand("merge", "write whole tensors to a new folder, as safetensors and Hugging Face's programs read it");
  auto* prunes = app.add_subcommand("prune", "remove steps");
  for (auto* command : {lists, shows, verifies, diffs, merges, prunes}) command->add_option("PATH", path, "which")->required();
  diffs->add_option("OTHER", other, "beside which")->required();
  merges->add_option("TO", other, "the new folder")->required();
  for (auto* command : {shows, diffs}) command->add_option("--only", pattern, "names that match: * and ? and a|b")->capture_default_str();
  diffs->add_option("--most", shown, "differences to show")->capture_default_str();
  merges->add_option("--part", part, "what the names begin with, and lose")->capture_default_str();
  merges->add_option("--file-gib", file_gib, "size of a file")->check(CLI::PositiveNumber)->capture_default_str();
  prunes->add_option("--keep-last", keep_last, "the newest that stay")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  prunes->add_option("--keep-every", keep_every, "multiples of this stay too")->check(CLI::NonNegativeNumber);
  prunes->add_option("--step", steps, "exactly these steps instead");
  prunes->add_flag("--dry-run", only_say, "say what would be removed");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (*lists) list(path);
  if (*shows) show(path, pattern);
  if (*verifies) return verify(path);
  if (*diffs) return diff(path, other, pattern, shown);
  if (*merges) merge(path, other, part, static_cast<int64_t>(file_gib * (1 << 30)));
  if (*prunes) prune(path, keep_last, keep_every, steps, only_say);
  return 0;
} catch (const c10::Error& error) {
  dt::detail::say("{}\n", error.what_without_backtrace());
  return kWrong;
} catch (const std::exception& error) {
  dt::detail::say("dtensor-checkpoint: {}\n", error.what());
  return kWrong;
}
