#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/holdings.hpp"
#include "src/checkpoint/step_files.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/error_text.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/mesh/world.hpp>

#include <ATen/ops/empty.h>
#include <nlohmann/json.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <map>
#include <string_view>
#include <utility>

#include <unistd.h>

namespace dtensor {

namespace {

using namespace checkpoints;

constexpr const char* kBestName = "best.json";

std::atomic<int> signal_that_came = 0;
void note(int signal) { signal_that_came = signal; }

// One for each run of a user, so that a job finds its own again.
std::string copy_folder_of(const std::string& folder, const ManagerOptions& options) {
  if (!options.copy_folder.empty()) return options.copy_folder;
  const auto whole = std::filesystem::absolute(folder).lexically_normal().string();
  return fmt::format("/dev/shm/dtensor-{}-{:016x}", getuid(), static_cast<uint64_t>(fingerprint(whole)[0]));
}

// The step and its value; nothing where the text has none.
std::optional<std::pair<int64_t, double>> best_from(const std::string& text) {
  const auto best = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto is = [&](const char* key, auto is_kind) { return best.is_object() && best.contains(key) && is_kind(best[key]); };
  if (!is("step", [](const auto& value) { return value.is_number_integer(); })) return {};
  if (!is("value", [](const auto& value) { return value.is_number(); })) return {};
  return std::pair(best["step"].get<int64_t>(), best["value"].get<double>());
}

}  // namespace

// Catches the signals of all managers of a process, which threads that are ranks share.
struct CheckpointManager::Signals {
  explicit Signals(const std::vector<int>& signals) {
    for (const int signal : signals) {
      struct sigaction action {
      }, before{};
      action.sa_handler = note;
      action.sa_flags = SA_RESTART;
      if (sigaction(signal, &action, &before) == 0) before_[signal] = before;
    }
  }
  ~Signals() {
    for (const auto& [signal, action] : before_) sigaction(signal, &action, nullptr);
    signal_that_came = 0;
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  std::map<int, struct sigaction> before_;
};

// What ranks told each other at the last step, on its way, and what is known of it.
struct CheckpointManager::Agreement {
  std::optional<DeviceMesh> line;
  comm::Communicator* group = nullptr;
  std::optional<comm::Async> under_way;
  bool stop = false, late = false;

  void receive() {
    if (!under_way) return;
    const auto known = std::move(*under_way).get();
    under_way.reset();
    stop |= known.data_ptr<int64_t>()[0] != 0;
    late = known.data_ptr<int64_t>()[1] != 0;
  }
};

CheckpointManager::CheckpointManager(State state, std::string folder, ManagerOptions options)
    : state_(std::move(state)),
      folder_(std::move(folder)),
      options_(std::move(options)),
      agreement_(std::make_shared<Agreement>()),
      last_time_(std::chrono::steady_clock::now()) {
  const Everyone everyone("CheckpointManager");
  std::string problem;
  if (everyone.is_first()) {
    try {
      require(!folder_.empty(), "CheckpointManager", "{}", kNoFolder);
      require(options_.keep_last >= 0 && options_.keep_every >= 0 && options_.every_steps >= 0 && options_.every_minutes >= 0 &&
                  options_.copy_every >= 0,
              "CheckpointManager", "a number is negative: every_steps {}, every_minutes {}, keep_last {}, keep_every {}, copy_every {}",
              options_.every_steps, options_.every_minutes, options_.keep_last, options_.keep_every, options_.copy_every);
      if (!options_.save.run.empty()) check_run();
    } catch (...) {
      problem = detail::text_of(std::current_exception());
    }
  }
  everyone.agree(problem);
  if (options_.copy_every > 0)
    copies_ = std::make_unique<MemoryCopies>(
        state_, MemoryCopiesOptions{.folder = copy_folder_of(folder_, options_), .save = options_.save});
  read_best();
  if (everyone.is_first() && !options_.stop_signals.empty()) signals_ = std::make_shared<Signals>(options_.stop_signals);
  else if (everyone.size() > 1 && !options_.stop_signals.empty() && World::current().transport().name() != "threads")
    signals_ = std::make_shared<Signals>(options_.stop_signals);
  if (everyone.size() > 1) {
    agreement_->line.emplace(init_device_mesh(c10::kCPU, {everyone.size()}, {"checkpoint_manager"}));
    agreement_->group = &agreement_->line->communicator(0);
  }
}

CheckpointManager::~CheckpointManager() = default;

// The newest step whose index can be read tells whose run it is.
void CheckpointManager::check_run() const {
  const auto steps = complete_steps(folder_);
  for (size_t i = steps.size(); i-- > 0;) {
    try {
      const auto index = read_index(step_folder(folder_, steps[i]));
      const auto run = index.writer.find("run");
      const auto found = run == index.writer.end() ? std::string("no name") : "'" + run->second + "'";
      require(found == "'" + options_.save.run + "'", "CheckpointManager",
              "'{}' has the steps of another run, of {}; expected '{}'; hint: choose another folder, or that run", folder_, found,
              options_.save.run);
      return;
    } catch (const Error& error) {
      if (i == 0 || std::string_view(error.what_without_backtrace()).find(kIsDamaged) == std::string_view::npos) throw;
    }
  }
}

// A best step that was removed by hand counts no more.
void CheckpointManager::read_best() {
  const Everyone everyone("CheckpointManager");
  std::string text;
  const auto path = folder_ + "/" + kBestName;
  try {
    if (everyone.is_first() && disk::exists(path)) text = disk::read_text(path);
    if (const auto best = best_from(text); best && !disk::exists(step_folder(folder_, best->first) + "/" + kIndexName)) text.clear();
  } catch (const std::exception&) {  // then there is none
    text.clear();
  }
  best_ = best_from(everyone.from_first(text));
}

std::optional<int64_t> CheckpointManager::resume(const LoadOptions& options) {
  const Everyone everyone("CheckpointManager");
  std::vector<int64_t> steps;
  std::string told, problem;
  try {
    if (everyone.is_first()) told = fmt::format("{} ", fmt::join(complete_steps(folder_), " "));
  } catch (...) {
    problem = detail::text_of(std::current_exception());
  }
  everyone.agree(problem);
  told = everyone.from_first(told);
  for (size_t begin = 0, end; (end = told.find(' ', begin)) != std::string::npos && end > begin; begin = end + 1)
    steps.push_back(std::stoll(told.substr(begin, end - begin)));
  if (const auto copy = resume_copy(options, steps.empty() ? -1 : steps.back())) return copy;
  for (size_t i = steps.size(); i-- > 0;) {
    try {
      load(state_, folder_, steps[i], options);
      last_saved_ = steps[i];
      return steps[i];
    } catch (const Error& error) {  // the same on every rank
      const std::string text = error.what_without_backtrace();
      if (i == 0 || text.find(kIsDamaged) == std::string::npos) throw;
      if (everyone.is_first()) detail::say("dtensor: step {} of '{}' is passed over: {}\n", steps[i], folder_, text);
    }
  }
  return {};
}

// Loads the copy in memory where it is newer than a step.
std::optional<int64_t> CheckpointManager::resume_copy(const LoadOptions& options, int64_t newer_than) {
  if (!copies_) return {};
  const auto step = copies_->last_step();
  if (!step || *step <= newer_than) return {};
  try {
    last_copied_ = copies_->resume(options);
  } catch (const Error& error) {  // the same on every rank
    const std::string text = error.what_without_backtrace();
    if (text.find(kIsDamaged) == std::string::npos) throw;
    if (World::current().rank() == 0) detail::say("dtensor: the copy of step {} in memory is passed over: {}\n", *step, text);
    return {};
  }
  return last_copied_;
}

// What was agreed on at the step before; and starts agreeing on this one.
bool CheckpointManager::asked_to_stop(bool& time_is_up) {
  if (options_.stop_signals.empty() && options_.every_minutes <= 0) return false;
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - last_time_;
  const bool stop = signal_that_came != 0, late = options_.every_minutes > 0 && since.count() >= 60 * options_.every_minutes;
  if (!agreement_->group) {
    time_is_up = late;
    return stop;
  }
  agreement_->receive();
  auto own = at::empty({2}, at::kLong);
  own.data_ptr<int64_t>()[0] = stop;
  own.data_ptr<int64_t>()[1] = agreement_->group->rank() == 0 && late;
  const comm::Subject subject("CheckpointManager");
  agreement_->under_way = agreement_->group->all_reduce(own, ReduceOp::max);
  time_is_up = std::exchange(agreement_->late, false);
  return std::exchange(agreement_->stop, false);
}

bool CheckpointManager::step(int64_t step) {
  bool time_is_up = false;
  const bool stop = asked_to_stop(time_is_up);
  if (stop) {
    if (last_saved_ != step) save(step);
    finish();
    return false;
  }
  const bool due = (options_.every_steps > 0 && step % options_.every_steps == 0) || time_is_up;
  if (due && last_saved_ != step) save(step);
  else if (copies_ && step % options_.copy_every == 0 && last_copied_ != step && last_saved_ != step) {
    copies_->save(step);
    last_copied_ = step;
  }
  return true;
}

void CheckpointManager::save(int64_t step) {
  complete();
  last_time_ = std::chrono::steady_clock::now();
  agreement_->receive();
  agreement_->late = false;  // of the time before
  saving_ = dtensor::save(state_, folder_, step, options_.save);
  last_saved_ = step;
  if (!options_.save.async) complete();
}

bool CheckpointManager::save_if_best(int64_t step, double value, bool higher) {
  if (!std::isfinite(value) || (best_ && (higher ? value <= best_->second : value >= best_->second))) return false;
  if (last_saved_ != step) save(step);
  complete();
  best_ = {step, value};
  const Everyone everyone("CheckpointManager");
  std::string problem;
  try {
    if (everyone.is_first()) disk::replace(folder_ + "/" + kBestName, nlohmann::json{{"step", step}, {"value", value}}.dump() + "\n");
  } catch (const std::exception& error) {
    problem = error.what();
  }
  everyone.agree(problem);
  prune();
  return true;
}

void CheckpointManager::finish() {
  complete();
  if (copies_ && last_copied_ && last_saved_ && *last_copied_ <= *last_saved_) copies_->remove();
}

void CheckpointManager::complete() {
  if (!saving_) return;
  auto saving = *saving_;
  saving_.reset();
  saving.wait();
  prune();
}

// The first rank removes complete steps that need not stay, never the last saved, and what earlier attempts left of steps before it. Later
// steps, of a run that went on from an earlier one, are left alone. A step that cannot be removed is left, with a line that says so.
void CheckpointManager::prune() {
  if (World::current().rank() != 0 || !last_saved_) return;
  try {
    auto steps = complete_steps(folder_);
    const auto later = std::ranges::upper_bound(steps, *last_saved_);
    if (later != steps.end() && !std::exchange(warned_, true))
      detail::say(
          "dtensor: '{}' has step {}, which is later than {}, just saved; hint: the next resume() takes it, unless it is removed "
          "(dtensor-checkpoint prune)\n",
          folder_, steps.back(), *last_saved_);
    steps.erase(later, steps.end());
    const auto last = static_cast<size_t>(options_.keep_last == 0 ? static_cast<int64_t>(steps.size()) : options_.keep_last);
    for (size_t i = 0; i + last < steps.size(); ++i) {
      const bool stays = (options_.keep_every > 0 && steps[i] % options_.keep_every == 0) || (best_ && best_->first == steps[i]);
      if (!stays) remove_step(folder_, steps[i]);
    }
    for (const auto& name : disk::names_in(folder_)) {
      const auto path = folder_ + "/" + name;
      const auto step = step_of(name);
      const bool is_older = step && *step < *last_saved_;
      if (is_older && std::filesystem::is_directory(path) && !disk::exists(path + "/" + kIndexName)) remove_step_files(path);
    }
  } catch (const std::exception& error) {
    detail::say("dtensor: an old checkpoint is left: {}\n", error.what());
  }
}

void remove_step(const std::string& folder, int64_t step) { remove_step_files(step_folder(folder, step)); }

}  // namespace dtensor
