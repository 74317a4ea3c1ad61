// What a training step of reinforcement learning tells, under the names that verl has for it: an object of numbers, "actor/entropy" and so
// on.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/rl/inputs.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <span>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::rl {

using Metrics = nlohmann::ordered_json;

// Adds `name`/mean, /max and /min of a plain tensor. Throws for an empty one.
void add_statistics(Metrics& metrics, const std::string& name, const at::Tensor& x);

// Seconds of the phases of a step, as "timing_s/NAME".
class Phases {
 public:
  explicit Phases(Metrics& metrics) : metrics_(&metrics) {}
  template <class F>
  decltype(auto) operator()(const std::string& name, F&& f);

 private:
  Metrics* metrics_;
};

// A file of one JSON object a line. Lines of steps from `step` on are left out of what the file had, so that a run which goes on writes
// what it would have written.
class JsonLines {
 public:
  // An empty path: nothing is written. Throws where the file cannot be written.
  JsonLines(const std::string& path, int64_t step);
  void add(const Metrics& metrics);

 private:
  std::ofstream file_;
  std::string path_;
};

// One line for a terminal.
std::string line_of(const Metrics& metrics);

// -- How ------------------------------------------------------------------------------------------------------------------

inline void add_statistics(Metrics& metrics, const std::string& name, const at::Tensor& x) {
  require(x.numel() > 0, "rl::add_statistics", "'{}' has no values", name);
  const NoSpmd plain;
  const auto on_host = x.to(at::kCPU, at::kDouble).contiguous();
  const std::span values(on_host.data_ptr<double>(), static_cast<size_t>(on_host.numel()));
  metrics[name + "/mean"] = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  metrics[name + "/max"] = std::ranges::max(values);
  metrics[name + "/min"] = std::ranges::min(values);
}

template <class F>
decltype(auto) Phases::operator()(const std::string& name, F&& f) {
  struct Clock {
    Metrics* metrics;
    std::string name;
    std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
    ~Clock() {
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
      auto& sum = (*metrics)["timing_s/" + name];
      sum = (sum.is_number() ? sum.get<double>() : 0.0) + seconds.count();
    }
  } clock{metrics_, name};
  return std::forward<F>(f)();
}

inline JsonLines::JsonLines(const std::string& path, int64_t step) : path_(path) {
  if (path.empty()) return;
  std::vector<std::string> kept;
  if (step > 0) {
    std::ifstream old(path);
    for (std::string line; std::getline(old, line);) {
      const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (object.is_object() && object.value("training/global_step", step) < step) kept.push_back(line);
    }
  }
  file_.open(path);
  for (const auto& line : kept) file_ << line << '\n';
  require(static_cast<bool>(file_.flush()), "rl::JsonLines", "cannot write '{}'; hint: is there a folder for it?", path);
}

inline void JsonLines::add(const Metrics& metrics) {
  if (path_.empty()) return;
  file_ << metrics.dump() << std::endl;
  require(static_cast<bool>(file_), "rl::JsonLines", "cannot write '{}'; hint: is the disk full?", path_);
}

inline std::string line_of(const Metrics& m) {
  const auto number = [&](const char* name) { return m.contains(name) ? m.at(name).get<double>() : 0.0; };
  auto line = fmt::format(
      "step {:4} | reward {:7.4f} | right {:6.4f} | kl {:8.1e} | clip {:6.4f} | entropy {:6.4f} | length {:5.1f} | no signal {:4.2f} | "
      "{:6.0f} ms | {:7.0f} tokens/s",
      m.at("training/global_step").get<int64_t>(), number("critic/score/mean"), number("reward/right"), number("actor/ppo_kl"),
      number("actor/pg_clipfrac"), number("actor/entropy"), number("response_length/mean"), number("groups/zero_variance"),
      1e3 * number("timing_s/step"), number("perf/throughput"));
  const auto unjudged = number("reward/failed") + number("reward/late");
  if (unjudged > 0) line += fmt::format(" | verifier failed {:4.2f}", unjudged);
  if (m.contains("critic/vf_loss")) line += fmt::format(" | value loss {:7.4f}", number("critic/vf_loss"));
  if (m.contains("val-core/acc/mean@1")) line += fmt::format(" | greedy exact {:6.4f}", number("val-core/acc/mean@1"));
  return line;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
