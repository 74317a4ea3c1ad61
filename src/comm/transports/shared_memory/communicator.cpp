// Makes an operation from the arguments of a collective.
#include "src/comm/transports/shared_memory/communicator.hpp"

#include "src/comm/reduce.hpp"

namespace dtensor::comm::shared_memory {

namespace {

Bytes all_of(const at::Tensor& tensor) { return {static_cast<char*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())}; }

// The tensor's pieces, one after the other.
std::vector<Bytes> pieces_of(const at::Tensor& tensor, Counts counts) {
  std::vector<Bytes> pieces;
  char* next = all_of(tensor).data;
  for (const int64_t count : counts) {
    pieces.push_back({next, count * static_cast<int64_t>(tensor.element_size())});
    next += pieces.back().size;
  }
  return pieces;
}

int64_t total(Counts counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  return sum;
}

// Dropped without a wait, the operation goes on in the background.
class OperationWork final : public Work {
 public:
  OperationWork(std::shared_ptr<Engine> engine, std::shared_ptr<Queue> queue, std::shared_ptr<Operation> operation, Milliseconds deadline)
      : engine_(std::move(engine)), queue_(std::move(queue)), operation_(std::move(operation)), deadline_(deadline) {}
  ~OperationWork() override {
    if (!operation_->ended()) engine_->carry_on();
  }
  void wait() override { engine_->wait(*queue_, *operation_, deadline_); }
  bool done() override { return engine_->poll(*operation_); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Operation> operation_;
  const Milliseconds deadline_;
};

}  // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(std::string name, std::vector<int> ranks, int rank, uint64_t id,
                                                   std::shared_ptr<gloo::Link> link, std::shared_ptr<gloo::MessageWorkers> messages,
                                                   const Transport& transport, std::unique_ptr<Channel> channel,
                                                   std::shared_ptr<Engine> engine, std::shared_ptr<FileSharing> sharing)
    : GlooCommunicator(std::move(name), std::move(ranks), rank, id, std::move(link), nullptr, std::move(messages), transport),
      queue_(std::make_shared<Queue>()), engine_(std::move(engine)), sharing_(std::move(sharing)) {
  queue_->channel = std::move(channel);
  queue_->name = this->name();
  queue_->ranks = this->ranks();
  queue_->stream = id;
}

Async SharedMemoryCommunicator::do_all_reduce(const Call& call, const at::Tensor& input, at::Tensor result) {
  return issue(make_all_reduce(announce(call, input, "shm"), {input, result}, all_of(input), all_of(result), size(), rank()), result);
}

Async SharedMemoryCommunicator::do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) {
  const auto& info = announce(call, input, "shm");
  return issue(make_gather(info, {input, result}, all_of(input), pieces_of(result, counts)), result);
}

Async SharedMemoryCommunicator::do_broadcast(const Call& call, const at::Tensor& input) {
  at::Tensor result = empty(input.sizes(), input.scalar_type());
  std::vector<Bytes> pieces(static_cast<size_t>(size()));
  pieces[call.root] = all_of(result);
  const auto& info = announce(call, input, "shm");
  return issue(make_gather(info, {input, result}, rank() == call.root ? all_of(input) : Bytes{}, std::move(pieces)), result);
}

Async SharedMemoryCommunicator::do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) {
  const auto& info = announce(call, input, "shm");
  return issue(make_reduce_scatter(info, {input, result}, pieces_of(input, counts), all_of(result)), result);
}

Async SharedMemoryCommunicator::do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) {
  at::Tensor result = empty({total(recv)}, input.scalar_type());
  const auto& info = announce(call, input, "shm");
  const bool direct = queue_->channel->reads_directly();
  return issue(make_all_to_all(info, {input, result}, pieces_of(input, send), pieces_of(result, recv), direct), result);
}

void SharedMemoryCommunicator::do_barrier(const Call& call) {
  issue(std::make_shared<Operation>(announce(call, at::Tensor(), "shm"), std::vector<at::Tensor>()), at::Tensor()).get();
}

Async SharedMemoryCommunicator::issue(const std::shared_ptr<Operation>& operation, const at::Tensor& result) {
  engine_->issue(queue_, operation);
  if (operation->ended() && operation->error().empty()) return {result, WorkPtr()};
  return {result, c10::make_intrusive<OperationWork>(engine_, queue_, operation, transport_.deadline())};
}

}  // namespace dtensor::comm::shared_memory
