// A rank's saves: what it remembers from one to the next, the copy of its state, and the thread that writes it.
#pragma once

#include "src/checkpoint/write_plan.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace dtensor::checkpoints {

// What a save writes: made on the training thread, used by the one that writes.
struct Job {
  std::string folder;  // of the step
  int64_t step = 0;
  std::string attempt;
  std::map<std::string, std::string> writer;
  int rank = 0, ranks = 1;
  std::string problem;                          // why the state could not be copied; empty: it was
  std::vector<WrittenFile> files;               // this rank's
  at::Tensor data;                              // of all of them, one after the other
  Contents contents;                            // values and further names
  std::map<std::string, SavedTensor> all;       // on the first rank: all tensors, without pieces
  std::map<std::string, SavedTensor> replicas;  // plain tensors that another rank writes: their checksums here
};

// What is known of the other ranks' parts, while the first one waits for their reports.
enum class Others { may_be_writing, have_written, have_failed };

// Writes this rank's files and, on the first rank, waits for the others and writes the index. Throws std::runtime_error.
void write(const Job& job, const std::atomic<Others>& others);

// Removes the files that an attempt left.
void remove_attempt(const std::string& folder, const std::string& attempt, int rank);

// One in each rank's World.
class Saver {
 public:
  Saver() = default;
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // The copy of the state, and who writes what of it. Every rank calls it; throws on all. The job's data are the saver's, until the
  // next one.
  Job prepare(const State& state, const std::string& folder, int64_t step, const SaveOptions& options, const Everyone& everyone);
  Saving save(const State& state, const std::string& folder, int64_t step, const SaveOptions& options);
  void wait(int64_t number);
  bool done(int64_t number) const { return number < number_ || !running_; }

 private:
  // What is the same while names, sizes, dtypes and layouts of all ranks are.
  struct Plan {
    std::vector<std::array<int64_t, 2>> fingerprints;  // by rank
    int64_t file_bytes = 0;
    std::vector<WrittenFile> files;
    std::map<std::string, SavedTensor> all;
    std::vector<std::string> replicas;
    at::Tensor data;
  };

  void join();
  std::string end(int most_seconds);  // waits, and returns what went wrong unless that was thrown already
  void make_plan(const Everyone& everyone, const std::string& text, const SaveOptions& options);
  void copy(const std::map<std::string, at::Tensor>& tensors, Job& job);
  void run(Job job, bool in_background);

  Plan plan_;
  std::thread thread_;
  std::atomic<bool> running_ = false;
  std::atomic<Others> others_ = Others::may_be_writing;
  std::string problem_;  // of the last save, until it has been thrown
  std::string last_folder_, last_attempt_;
  int64_t number_ = 0, waited_for_ = 0;  // of saves: begun, and waited for on all ranks
};

}  // namespace dtensor::checkpoints
