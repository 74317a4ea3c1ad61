// Memory of which each rank of a group has a part, and that all of them read and write without asking each other: a rank puts data where
// another one will read it, and signals that it is there.
//
//   dt::SymmetricMemory memory(mesh.communicator(mesh.dim("ep")), 1 << 20);    // every rank: 1 MiB each
//
//   const int next = (memory.rank() + 1) % memory.size(), last = (memory.rank() + memory.size() - 1) % memory.size();
//   memory.put(x, next);                                                       // into the next rank's part
//   memory.signal(next);                                                       // "it is there"
//   memory.wait(last, 1);                                                      // until rank `last` has signalled once
//   auto y = memory.view(memory.rank(), x.sizes(), x.scalar_type());           // what it put here
//
// It is there where ranks share memory: with threads, and with shm for groups of one host. It is not a collective: ranks call put, get,
// signal and wait when they like, from any thread, and nothing is compared. What they promise is order: after a wait that a signal ended,
// a rank sees all that the signalling rank had put, or written, before that signal. Whoever puts into memory that another rank may still
// read has to be told before, by a signal the other way.
#pragma once

#include <dtensor/comm/communicator.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

class SymmetricMemory {
 public:
  // Whether the ranks of the group share memory; the same on all of them. A group of one rank does. Communicates nothing.
  static bool is_available(comm::Communicator& group);

  // `bytes` on each rank, zeros at first, and `pads` counters of signals for each pair of ranks. Every rank of the group calls it, with the
  // same numbers; communicates two all_gathers. Throws on every rank where ranks share no memory, their numbers differ, or there is no
  // room. The group must live as long as it is used.
  explicit SymmetricMemory(comm::Communicator& group, int64_t bytes, int pads = 1);

  // Waits for nobody: the memory is there until all ranks and all tensors let go of it. A rank that waits for a signal of this one that
  // has not come by then gets an error.
  ~SymmetricMemory();
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  int rank() const { return rank_; }  // positions in the group, here and below
  int size() const { return size_; }
  int64_t bytes() const { return bytes_; }
  int pads() const { return pads_; }

  // This rank's part, uint8 [bytes]: the memory itself.
  at::Tensor local() const;
  // The memory `offset` bytes into the part of `rank`, as a tensor of these sizes. It may outlive the SymmetricMemory. Throws where it
  // does not fit, and for an offset that is no multiple of the dtype's size.
  at::Tensor view(int rank, c10::IntArrayRef sizes, c10::ScalarType dtype, int64_t offset = 0) const;

  // Copies x, a contiguous CPU tensor of any dtype, `offset` bytes into the part of rank `to`. x may be written when it returns.
  void put(const at::Tensor& x, int to, int64_t offset = 0);
  // The same of some rows of x [rows, ...], those with the numbers `rows`, int64 [any]. The offset is a multiple of the dtype's size.
  void put_rows(const at::Tensor& x, const at::Tensor& rows, int to, int64_t offset = 0);
  // A copy of what lies there, in a new tensor with the sizes and dtype of `like`.
  at::Tensor get(const at::Tensor& like, int from, int64_t offset = 0);

  // Counts one more on the pad that rank `to` has for this rank. What this thread wrote before is visible to who waits for it.
  void signal(int to, int pad = 0);
  // Blocks until rank `from` has signalled `count` times on this pad, since the memory was made. Sleeps after a short while. Throws where
  // that will not be: the job failed, the rank has left or destroyed its part, or the deadline passed. The memory can be used afterwards.
  void wait(int from, int64_t count, int pad = 0);
  // How many signals have come. What was put before the last of them is there.
  int64_t signals(int from, int pad = 0) const;

 private:
  struct Member;
  using Counter = std::atomic<int64_t>;

  void make(const char* op);
  Member& member(int rank) const;
  Counter& counter(int of, int from, int pad) const;
  char* part(int rank) const;
  std::string why_never(int from, bool is_gone) const;
  void sleep_until_signalled(int from, int64_t count, int pad, const comm::EventRef& event) const;
  void check_rank(const char* op, int rank) const;
  void check_pad(const char* op, int rank, int pad) const;
  void check_range(const char* op, int rank, int64_t offset, int64_t bytes) const;
  comm::EventRef note(comm::Collective kind, int peer, int pad, int64_t sequence, const at::Tensor& data = {}) const;

  comm::Communicator& group_;
  const std::shared_ptr<comm::MemorySharing> sharing_;  // null in a group of one that has none
  const int rank_, size_;
  const int64_t bytes_;
  const int pads_;
  const int64_t row_bytes_, counters_at_, parts_at_;  // of the signals of a pair of ranks; where in the memory
  std::shared_ptr<char> memory_;
  std::atomic<int64_t> copies_{0};  // puts and gets so far
};

}  // namespace dtensor

#pragma GCC visibility pop
