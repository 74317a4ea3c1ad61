// Collectives among a fixed, ordered group of ranks. A transport implements the functions do_...
//
// Tensors are contiguous and on the mesh's device; they are read as flat lists of elements in memory order. Counts are numbers of
// elements, one per rank of the group, any of them 0: nothing is padded. Results are new tensors, or `into`, which has their size and
// dtype and shares no memory with the input. Reductions add in rank order on every transport but nccl, so that a run gives the same bits on
// all of them. An input must not be written until the work is done; it is kept alive by the work.
#pragma once

#include <dtensor/base/reduce_op.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/comm/work.hpp>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace dtensor::comm {

using Counts = c10::ArrayRef<int64_t>;

class Communicator {
 public:
  // `name` is what errors and records call the group, e.g. "tp"; `ranks` are world ranks.
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

  // The reduction of every rank's `input`, which must have one size and dtype. Result: like input. norm2 is not a
  // collective (redistribute lowers it to sum). With `in_place` the result is `input` itself; without, `input` stays as it is.
  Async all_reduce(const at::Tensor& input, ReduceOp op, bool in_place = false);

  // The ranks' inputs, one after the other. Rank r gives counts[r] elements. Result: [sum(counts)].
  Async all_gather(const at::Tensor& input, Counts counts, at::Tensor into = {});

  // Every rank gives sum(counts) elements; rank r gets the reduction of the r-th piece. Result: [counts[rank]].
  Async reduce_scatter(const at::Tensor& input, Counts counts, ReduceOp op, at::Tensor into = {});

  // Piece r of `input` (send[r] elements) goes to rank r; piece r of the result came from rank r. Result: [sum(recv)].
  Async all_to_all(const at::Tensor& input, Counts send, Counts recv);

  // The input of `root`. The others' inputs give size and dtype only. Result: like input.
  Async broadcast(const at::Tensor& input, int root);

  // Point to point. Messages between two ranks with one tag arrive in order, and are numbered by peer and tag. `recv`
  // returns a tensor like `like`. A send of at most 64 KiB is buffered: it completes without the receiver.
  Async send(const at::Tensor& input, int to, int tag = 0);
  Async recv(const at::Tensor& like, int from, int tag = 0);

  // Returns when every rank of the group has called it.
  void barrier();

  // Tells the transport that `tensor`'s memory will be used again and again, so that it may move it without copies of its own. Undone when
  // the handle goes, which may outlive the communicator but not the memory. Every rank calls it alike. Null where that is no use.
  virtual std::shared_ptr<void> register_memory(const at::Tensor& tensor);

  // -- For transports: what they implement, and may hand on to another communicator that they stand on. Everybody else calls the functions
  // above, which check, count and record.

  // What a call is, and what every rank must agree on.
  struct Call {
    Collective kind;
    uint64_t sequence = 0;
    ReduceOp op = ReduceOp::sum;
    int root = 0;  // or the peer of a send or recv
    int tag = 0;
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

 private:
  Call begin(Call call, const at::Tensor& input, Counts counts = {});
  Call begin_message(Collective kind, const at::Tensor& input, int peer, int tag);
  EventRef issue(const Call& call, const at::Tensor& input, Counts counts);

  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  std::unique_ptr<Events> events_;
  int group_index_ = -1;
  uint64_t sequence_ = 0;                               // of collectives
  std::map<std::pair<int, int>, uint64_t> sent_, received_;  // of messages, by (peer, tag)
};

}  // namespace dtensor::comm
