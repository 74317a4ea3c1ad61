// A group whose ranks share a host: collectives go through shared memory, messages over gloo.
#pragma once

#include "src/comm/transports/gloo/communicator.hpp"
#include "src/comm/transports/shared_memory/engine.hpp"
#include "src/comm/transports/shared_memory/sharing.hpp"

namespace dtensor::comm::shared_memory {

class SharedMemoryCommunicator final : public gloo::GlooCommunicator {
 public:
  SharedMemoryCommunicator(std::string name, std::vector<int> ranks, int rank, uint64_t id, std::shared_ptr<gloo::Link> link,
                           std::shared_ptr<gloo::MessageWorkers> messages, const Transport& transport, std::unique_ptr<Channel> channel,
                           std::shared_ptr<Engine> engine, std::shared_ptr<FileSharing> sharing);

  std::shared_ptr<MemorySharing> memory_sharing() override { return sharing_; }

 private:
  Async do_all_reduce(const Call& call, const at::Tensor& input, at::Tensor result) override;
  Async do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override;
  Async do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override;
  Async do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) override;
  Async do_broadcast(const Call& call, const at::Tensor& input) override;
  void do_barrier(const Call& call) override;

  Async issue(const std::shared_ptr<Operation>& operation, const at::Tensor& result);

  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<FileSharing> sharing_;
};

}  // namespace dtensor::comm::shared_memory
