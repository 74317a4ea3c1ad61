// The collectives of a group: CUDA tensors go over NCCL, CPU tensors over the communicator of the transport between processes.
#pragma once

#include "src/comm/transports/nccl/pair.hpp"
#include "src/comm/transports/nccl/watchdog.hpp"

#include <atomic>
#include <map>

namespace dtensor::comm::nccl {

// What the communicators of a rank share.
struct Session {
  Session(int rank, int device, Control* control, const Transport& transport)
      : rank(rank), device(device), control(control), watchdog(control, transport) {}

  const int rank, device;
  Control* const control;  // null in a world of one
  Watchdog watchdog;
  std::shared_ptr<Communicator> everyone;  // of the host
  std::shared_ptr<Channel> world;          // of all ranks; its like are split from it
  std::mutex mutex;
  std::map<int, Pair> pairs;  // by peer: those that messages went to, or came from
};

class NcclCommunicator final : public Communicator {
 public:
  // `id` is the same on all ranks of the group, another one for each group.
  NcclCommunicator(std::shared_ptr<Communicator> host, uint64_t id, std::shared_ptr<Session> session);

  std::shared_ptr<void> register_memory(const at::Tensor& tensor) override;

  // A channel of its own for the ranks of `host`, who all call it.
  static std::shared_ptr<Channel> make_channel(Communicator& host, int device, const Check& check);

 private:
  Async do_all_reduce(const Call&, const at::Tensor& input, at::Tensor result) override;
  Async do_all_gather(const Call&, const at::Tensor& input, Counts counts, at::Tensor result) override;
  Async do_reduce_scatter(const Call&, const at::Tensor& input, Counts counts, at::Tensor result) override;
  Async do_all_to_all(const Call&, const at::Tensor& input, Counts send, Counts recv) override;
  Async do_broadcast(const Call&, const at::Tensor& input) override;
  Async do_send(const Call&, const at::Tensor& input) override;
  Async do_recv(const Call&, const at::Tensor& like) override;
  void do_barrier(const Call&) override;

  bool goes_over_host(const Call& call, const at::Tensor& tensor) const;
  std::shared_ptr<Channel> channel(const CallInfo& call);
  void compare(const CallInfo& mine);
  Async collective(const Call& call, const at::Tensor& input, const at::Tensor& result, const Channel::Enqueue& enqueue);
  Async message(const Call& call, const at::Tensor& tensor, bool sends);
  WorkPtr issue(std::shared_ptr<Pending> work, const Channel::Enqueue& enqueue);
  Pair& pair_with(int peer, const std::shared_ptr<Pending>& first);

  const std::shared_ptr<Communicator> host_;
  const uint64_t id_;
  const std::shared_ptr<Session> session_;
  std::vector<int> peers_;  // world ranks
  std::mutex mutex_;
  std::shared_ptr<Channel> channel_;  // made by the first collective
};

}  // namespace dtensor::comm::nccl
