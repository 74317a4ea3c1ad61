// Collectives among a fixed, ordered group of ranks. A transport implements the functions do_...
//
// Tensors are contiguous, on the mesh's device, and read as flat lists of elements in memory order. Counts are numbers of elements, one per
// rank of the group; any may be 0, and nothing is padded. Results are new tensors, or `into`, which has the result's size and dtype and
// shares no memory with the input. Reductions add in rank order on every transport but nccl, so a run gives the same bits on all of them.
// Do not write an input until its work is done. The work keeps the input alive.
#pragma once

#include <dtensor/base/reduce_op.hpp>
#include <dtensor/comm/call_info.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/comm/work.hpp>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {
class SymmetricMemory;
}

namespace dtensor::comm {

class FailedOperators;
class MemorySharing;

using Counts = c10::ArrayRef<int64_t>;

class Communicator {
 public:
  // `name` is what errors and events call the group, e.g. "tp"; `ranks` are world ranks.
  Communicator(std::string name, std::vector<int> ranks, int rank);
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::string& name() const { return name_; }
  const std::vector<int>& ranks() const { return ranks_; }
  int rank() const { return rank_; }  // this rank's position in the group
  int size() const { return static_cast<int>(ranks_.size()); }

  // Whose events its calls are from now on. Those of a world's communicators are the rank's; without this, a call leaves no event.
  void record_in(Events events);

  // Reduces the inputs of all ranks, which must have one size and dtype. Result: like input; with `in_place`, `input` itself.
  // norm2 is not a collective (redistribute lowers it to sum).
  Async all_reduce(const at::Tensor& input, ReduceOp op, bool in_place = false);

  // Joins the ranks' inputs in rank order. Rank r gives counts[r] elements. Result: [sum(counts)].
  Async all_gather(const at::Tensor& input, Counts counts, at::Tensor into = {});

  // Reduces the inputs of all ranks, sum(counts) elements each, and gives rank r the r-th piece. Result: [counts[rank]].
  Async reduce_scatter(const at::Tensor& input, Counts counts, ReduceOp op, at::Tensor into = {});

  // Sends piece r of `input` (send[r] elements) to rank r; piece r of the result comes from rank r. Result: [sum(recv)].
  Async all_to_all(const at::Tensor& input, Counts send, Counts recv);

  // Copies the input of `root` to all ranks. The others' inputs give only size and dtype. Result: like input.
  Async broadcast(const at::Tensor& input, int root);

  // Point to point. Messages between two ranks with the same tag arrive in order; they are numbered by peer and tag. `recv` returns a
  // tensor like `like`. A send of at most 64 KiB is buffered: it completes without the receiver.
  Async send(const at::Tensor& input, int to, int tag = 0);
  Async recv(const at::Tensor& like, int from, int tag = 0);

  // Returns when every rank of the group has called it.
  void barrier();

  // Its calls leave no events from now on: for a group that exists only for its sizes.
  void leave_no_events() { events_.reset(); }

  // Tells the transport that `tensor`'s memory will be used repeatedly, so that it can send it without copying it first. Every rank calls
  // it alike. Destroying the handle undoes it; the handle may outlive the communicator, but not the memory. Null if the transport does
  // nothing.
  virtual std::shared_ptr<void> register_memory(const at::Tensor& tensor);

  // -- For transports: they implement these, and may forward them to another communicator. Other code calls the functions above, which
  // check the arguments, number the call and make its event.

  // The operators that failed on this rank; calls tell the other ranks of them from now on.
  void tell_failures(std::shared_ptr<const FailedOperators> failed) { failed_ = std::move(failed); }

  struct Call : CallInfo {
    EventRef event{};  // to be marked: started, done or failed. Of what is done when do_...() returns without a Work the caller does it.
  };
  virtual Async do_all_reduce(const Call&, const at::Tensor& input, at::Tensor result) = 0;  // result: may be the input
  virtual Async do_all_gather(const Call&, const at::Tensor& input, Counts counts, at::Tensor result) = 0;
  virtual Async do_reduce_scatter(const Call&, const at::Tensor& input, Counts counts, at::Tensor result) = 0;
  virtual Async do_all_to_all(const Call&, const at::Tensor& input, Counts send, Counts recv) = 0;
  virtual Async do_broadcast(const Call&, const at::Tensor& input) = 0;
  virtual Async do_send(const Call&, const at::Tensor& input) = 0;
  virtual Async do_recv(const Call&, const at::Tensor& like) = 0;
  virtual void do_barrier(const Call&) = 0;
  // How its ranks come to memory that all of them address, for SymmetricMemory; null, on all ranks, where they do not.
  virtual std::shared_ptr<MemorySharing> memory_sharing();

 private:
  friend class dtensor::SymmetricMemory;  // which leaves events

  Call begin(const CallInfo& call, const at::Tensor& input, Counts counts = {});
  Call begin_message(Collective kind, const at::Tensor& input, int peer, int tag);
  Call begin(CallInfo call, uint64_t& sequence, const at::Tensor& input, Counts counts);
  EventRef issue(const CallInfo& call, const at::Tensor& input);

  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  std::unique_ptr<Events> events_;
  std::shared_ptr<const FailedOperators> failed_;
  int group_index_ = -1;
  uint64_t sequence_ = 0;                               // of collectives
  std::map<std::pair<int, int>, uint64_t> sent_, received_;  // of messages, by (peer, tag)
};

}  // namespace dtensor::comm

#pragma GCC visibility pop
