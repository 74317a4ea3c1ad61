// The collectives and messages of a group over gloo.
#pragma once

#include "src/comm/transports/gloo/job.hpp"

namespace dtensor::comm::gloo {

class GlooCommunicator : public Communicator {
 public:
  GlooCommunicator(std::string name, std::vector<int> ranks, int rank, uint64_t id, std::shared_ptr<Link> link,
                   std::shared_ptr<Worker> collectives, std::shared_ptr<MessageWorkers> messages, const Transport& transport)
      : Communicator(std::move(name), std::move(ranks), rank), id_(id), link_(std::move(link)), transport_(transport),
        collectives_(std::move(collectives)), messages_(std::move(messages)) {}

 protected:
  Async do_all_reduce(const Call& call, const at::Tensor& input, at::Tensor result) override;
  Async do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override;
  Async do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override;
  Async do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) override;
  Async do_broadcast(const Call& call, const at::Tensor& input) override;
  Async do_send(const Call& call, const at::Tensor& input) override;
  Async do_recv(const Call& call, const at::Tensor& like) override;
  void do_barrier(const Call& call) override;

  // Notes that this rank has made the call. Throws where the input is not on the host.
  const Call& announce(const Call& call, const at::Tensor& input, std::string_view transport);

  const uint64_t id_;  // all members have the same, other groups another
  const std::shared_ptr<Link> link_;
  const Transport& transport_;

 private:
  Async reduce_pieces(const Call& call, const at::Tensor& input, Counts counts, const at::Tensor& result, Bytes target, bool share);
  std::shared_ptr<Job> start(const Call& call, const at::Tensor& input);
  std::shared_ptr<Job> start_message(const Call& call, const at::Tensor& tensor, int from, int to);
  static Async finish(std::shared_ptr<Job> job, const at::Tensor& result, std::shared_ptr<Worker> worker, bool in_background);
  Async finish_message(std::shared_ptr<Job> job, const at::Tensor& result) const;

  std::shared_ptr<Worker> collectives_;
  std::shared_ptr<MessageWorkers> messages_;
};

}  // namespace dtensor::comm::gloo
