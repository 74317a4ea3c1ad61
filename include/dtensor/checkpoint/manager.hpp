// Saves now and then, keeps what is worth keeping, goes on from the last step, and saves when the job is told to stop.
//
//   dt::CheckpointManager manager(state, "run", {.every_steps = 500, .keep_last = 3});
//   for (int64_t step = manager.resume().value_or(0); step < steps; ++step) {
//     ...
//     if (!manager.step(step + 1)) break;   // SIGTERM came, and the state is saved
//   }
//   manager.finish();
#pragma once

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/checkpoint/memory_copies.hpp>

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

struct ManagerOptions {
  int64_t every_steps = 0;                 // 0: not by steps
  double every_minutes = 0;                // since the last save began, by the first rank's clock; 0: not by time
  int64_t keep_last = 3;                   // how many of the newest steps stay; 0: all
  int64_t keep_every = 0;                  // steps that are multiples of this stay too; 0: none
  std::vector<int> stop_signals{SIGTERM};  // that make step() save and return false; Slurm sends SIGTERM before the time is up
  SaveOptions save{.async = true};         // .run: a folder that has another run's steps is refused
  int64_t copy_every = 0;                  // steps from one copy in memory to the next (MemoryCopies); 0: none
  std::string copy_folder{};               // where; empty: a folder in /dev/shm, named after this one's path and the user
};

// Every rank makes one and calls its functions alike. While one lives, its process catches the stop signals; one manager at a time does.
class CheckpointManager {
 public:
  // Throws on every rank where the folder has steps of another run.
  CheckpointManager(State state, std::string folder, ManagerOptions options = {});
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  // Loads the newest complete step, or the copy in memory where that is newer, and returns it; nothing where there is none. A step whose
  // data turn out to be damaged is passed over, with a line on stderr that says so, and the one before it is loaded.
  std::optional<int64_t> resume(const LoadOptions& options = {});

  // Call after each training step, with the number of steps that are done. Saves where that is due. Returns false once a stop signal came
  // to any rank: the state is then saved and the save complete. Ranks learn of signals and of the time one step later, by an all_reduce of
  // 16 bytes that nobody waits for; counting steps takes no communication, so without stop signals and every_minutes there is none.
  bool step(int64_t step);

  // Saves now, whatever is due.
  void save(int64_t step);

  // Saves, and keeps the step for as long as no other is given a better value: a lower one, or with `higher` a higher one. For losses and
  // scores of an evaluation, which are equal on all ranks. NaN and infinity are no best. Returns whether it saved.
  bool save_if_best(int64_t step, double value, bool higher = false);
  std::optional<int64_t> best_step() const { return best_ ? std::optional(best_->first) : std::nullopt; }

  // Waits for what is being written, and removes what need not be kept: older steps, and copies in memory that are not newer than the last
  // step. Throws what went wrong in the background.
  void finish();

 private:
  bool asked_to_stop(bool& time_is_up);
  std::optional<int64_t> resume_copy(const LoadOptions& options, int64_t newer_than);
  void complete();
  void prune();
  void check_run() const;
  void read_best();

  State state_;
  const std::string folder_;
  const ManagerOptions options_;
  struct Signals;
  std::shared_ptr<Signals> signals_;
  struct Agreement;
  std::shared_ptr<Agreement> agreement_;
  std::unique_ptr<MemoryCopies> copies_;
  std::optional<int64_t> last_copied_;
  std::optional<Saving> saving_;
  std::optional<std::pair<int64_t, double>> best_;
  std::optional<int64_t> last_saved_;
  std::chrono::steady_clock::time_point last_time_;
  bool warned_ = false;
};

// Removes a step: first its index, so that it is never half there. Call it on one rank. Throws std::runtime_error where that cannot be
// done.
void remove_step(const std::string& folder, int64_t step);

}  // namespace dtensor

#pragma GCC visibility pop
