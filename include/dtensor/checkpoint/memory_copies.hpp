// Copies of the state in the hosts' memory, each rank's also on another host: after a crash, or the loss of a host, training goes on from a
// few steps ago, without a disk.
//
//   dt::MemoryCopies copies(state, {.folder = "/dev/shm/my_run"});
//   for (int64_t step = copies.resume().value_or(0); step < steps; ++step) {
//     ...
//     if ((step + 1) % 10 == 0) copies.save(step + 1);
//   }
//   copies.remove();   // the job is done
//
// CheckpointManager makes them by itself: ManagerOptions::copy_every.
#pragma once

#include <dtensor/checkpoint/checkpoint.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

namespace checkpoints {
struct Job;
class Everyone;
}  // namespace checkpoints

struct MemoryCopiesOptions {
  std::string folder{};  // of this rank's host, in memory: below /dev/shm. Ranks may name different ones
  int distance = 0;      // rank r's copy goes to rank r + distance; 0: the number of ranks of a host (LOCAL_WORLD_SIZE), or 1
  SaveOptions save{};    // .only, .without, .run
};

// Every rank makes one and calls its functions alike.
//
// A copy outlives the processes, and not the host. It is there when the job is started again, on any mesh and any number of ranks, if no
// host was replaced, or only hosts whose partners were not. Each rank's host keeps the newest copy, of this rank's part and of another's,
// and while it is replaced the one before: at most four times the part.
class MemoryCopies {
 public:
  // Throws where no folder is named.
  MemoryCopies(State state, MemoryCopiesOptions options);
  ~MemoryCopies();
  MemoryCopies(const MemoryCopies&) = delete;
  MemoryCopies& operator=(const MemoryCopies&) = delete;

  // Copies the state. Returns when all ranks have it; the training waits. Communicates each rank's part once. Throws on every rank where a
  // rank's memory is full, and for what dt::save refuses; the copy before is then left.
  void save(int64_t step);

  // The newest step of which all parts are somewhere; nothing: there is none.
  std::optional<int64_t> last_step() const;

  // Loads that step and returns it. Throws on every rank where it does not fit the state, or is damaged.
  std::optional<int64_t> resume(const LoadOptions& options = {});

  // Removes the copies.
  void remove();

 private:
  struct Found;
  std::optional<Found> find(const checkpoints::Everyone& everyone) const;
  void write(const checkpoints::Job& job, const checkpoints::Everyone& everyone) const;
  void keep_partners(const checkpoints::Job& job, const std::vector<checkpoints::Index>& reports,
                     const checkpoints::Everyone& everyone) const;
  std::string folder_of(int64_t step) const;

  State state_;
  const MemoryCopiesOptions options_;
  std::unique_ptr<checkpoints::Saver> saver_;
};

}  // namespace dtensor

#pragma GCC visibility pop
