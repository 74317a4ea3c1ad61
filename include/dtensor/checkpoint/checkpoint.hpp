// Checkpoints: training state is saved on one mesh and loaded on any other, also after a crash at any byte.
//
//   dt::State state{{"model", *model}, {"optimizer", optimizer}, {"random", dt::random_streams()}, {"epoch", epoch}};
//   if (auto last = dt::last_step("run")) dt::load(state, "run", *last);
//   ...
//   dt::save(state, "run", step, {.async = true});   // every rank; returns when the state is copied
//
// A step is a folder, "run/step-100", with safetensors files and an index, index.json. It exists when the index has been renamed into
// place, after all else was synced. Nothing that an index names is ever written again.
#pragma once

#include <dtensor/checkpoint/index.hpp>
#include <dtensor/checkpoint/state.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

namespace checkpoints {
class Saver;
}

struct SaveOptions {
  std::vector<std::string> only{"*"};     // patterns (`*`, `?`, `a|b`, `re:...`) of names, such as "model.*": what is saved
  std::vector<std::string> without{};     // and what is not
  bool async = false;                     // return once the state is copied to host memory, and write in the background
  bool wait = true;                       // while an earlier save is being written: wait for it; false: throw
  int64_t file_bytes = int64_t{4} << 30;  // of a file; a larger tensor has a file to itself
  std::string run{};                      // a name of the run, kept in the index
};

// A save that may be still under way. Copies stand for the same save. It need not be kept: what went wrong is also thrown, on every rank,
// by the next save, and the end of the world waits for it.
class Saving {
 public:
  // Waits until the step exists. Every rank calls it. Throws on every rank what went wrong on any.
  void wait();
  // Whether this rank has nothing left to write.
  bool done() const;

  explicit Saving(checkpoints::Saver& saver, int64_t number) : saver_(&saver), number_(number) {}

 private:
  checkpoints::Saver* saver_;
  int64_t number_;
};

// Saves a state as step `step` of the run in `folder`, which is made where it is missing. Every rank of the world calls it. Each element is
// written by one rank; what several ranks hold is shared out among them. Ranks talk in one small all_gather, and when names, sizes, dtypes
// or layouts are not those of the save before, in one more of their descriptions. Beside the files the host keeps a copy of what this rank
// writes, for the next save.
//
// A step that exists is replaced when the new one is complete, and not before. A step that was not completed is of no account.
//
// Throws on every rank where a rank cannot write (a full disk, no permission), where ranks name other folders, steps or tensors of other
// sizes, where a plain tensor or value differs among the ranks that have it (see of_each_rank), for Partial, sparse and undefined tensors,
// and inside a step of a pipeline. Then the checkpoint's step is what it was before.
Saving save(const State& state, const std::string& folder, int64_t step, const SaveOptions& options = {});

struct LoadOptions {
  std::vector<std::string> only{"*"};  // patterns of names in the state: what is loaded
  std::vector<std::string> without{};
  std::vector<std::pair<std::string, std::string>> rename{};  // of saved names: what begins with the first begins with the second
  bool partial = false;  // leave what the checkpoint lacks as it is, and let it have what the state lacks
  bool convert = false;  // to the dtypes that the state has
};

// Loads a step, the last one if none is given, into the state: tensors get the values and keep their layouts, whatever mesh they were saved
// on. Returns the step. Every rank of the world calls it. Each saved byte that any rank wants is read by one rank, its checksum compared,
// and given to the others that want it, in rounds of 16 MiB of all ranks together; on the mesh that saved nothing is sent.
//
// Throws on every rank: for a folder without a complete step (naming the closest there is), a damaged index, names, sizes and dtypes that
// do not fit, which are listed together, parameters whose gradients are not reduced yet (after NoSync), and inside a step of a pipeline;
// then the state is what it was. For data that are damaged or cannot be read, naming file and tensor; then some tensors have the new values
// and others the old ones, so load another step.
int64_t load(const State& state, const std::string& folder, std::optional<int64_t> step = {}, const LoadOptions& options = {});

// Loads what an index names: a step, or the files of another library. Every rank of the world has read the same index, and sees its files.
// Throws as above, and where the ranks' indexes differ.
void load(const State& state, const checkpoints::Index& index, const LoadOptions& options = {});

// The complete steps in a folder, ascending; by the names of folders and whether they have an index. The folder may be missing.
std::vector<int64_t> complete_steps(const std::string& folder);
std::optional<int64_t> last_step(const std::string& folder);

// "run/step-100"
std::string step_folder(const std::string& folder, int64_t step);

namespace checkpoints {

// What this rank did in its last load.
struct LoadCounts {
  int64_t bytes_read = 0;    // of data in files
  int64_t bytes_sent = 0;    // to other ranks
  int64_t bytes_loaded = 0;  // of tensors that this rank holds
};
LoadCounts last_load();

}  // namespace checkpoints

}  // namespace dtensor

#pragma GCC visibility pop
