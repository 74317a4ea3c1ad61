// The threads transport: ranks are threads of one process and exchange pointers.
#include <dtensor/base/error.hpp>
#include <dtensor/comm/transport_kind.hpp>

#include "src/comm/failed_operators.hpp"
#include "src/comm/memory_sharing.hpp"
#include "src/comm/reduce.hpp"
#include "src/comm/transports/threads/hub.hpp"

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

namespace dtensor::comm {

namespace threads {

namespace {

class SlotWork final : public Work {
 public:
  SlotWork(std::shared_ptr<Group> group, std::shared_ptr<Slot> slot, Communicator::Call call, std::string name, Milliseconds deadline)
      : group_(std::move(group)), slot_(std::move(slot)), call_(std::move(call)), name_(std::move(name)), deadline_(deadline) {}

  void wait() override {
    if (!slot_) return;
    auto outcome = slot_->wait(deadline_);
    if (outcome == Slot::Outcome::late) {
      group_->give_up(*slot_, deadline_);
      outcome = slot_->wait(deadline_);  // it has failed; or all have come meanwhile, and it is being done
    }
    if (outcome != Slot::Outcome::done) call_.event.failed();  // also where the meeting had failed before this rank came
    switch (outcome) {
      case Slot::Outcome::done: slot_.reset(); return;
      case Slot::Outcome::failed: fail(name(call_.kind), "{}", failure(call_, name_, slot_->error()));
      case Slot::Outcome::late: fail(name(call_.kind), "{}", lateness(call_, name_, deadline_, {}));
    }
  }

  bool done() override { return !slot_ || slot_->poll(); }

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<Slot> slot_;
  const Communicator::Call call_;
  const std::string name_;
  const Milliseconds deadline_;
};

// Ranks have one memory.
class ProcessSharing final : public MemorySharing {
 public:
  ProcessSharing(std::shared_ptr<Hub> hub, std::vector<int> ranks, const Transport& transport)
      : hub_(std::move(hub)), ranks_(std::move(ranks)), transport_(transport) {}

  Offer offer(int64_t bytes) override {
    Offer made{zeroed_memory(bytes), {0, memory_token()}, nullptr};
    hub_->offer(made.ticket.token, made.memory);
    made.open = {nullptr, [hub = hub_, token = made.ticket.token](void*) { hub->withdraw(token); }};
    return made;
  }
  std::shared_ptr<char> take(int, const MemoryTicket& ticket, int64_t) override {
    auto memory = hub_->take(ticket.token);
    if (!memory) throw std::system_error(ESTALE, std::generic_category());
    return memory;
  }
  std::optional<std::string> obstacle(int member) override { return hub_->obstacle(ranks_[member]); }
  Milliseconds deadline() const override { return transport_.deadline(); }

 private:
  const std::shared_ptr<Hub> hub_;
  const std::vector<int> ranks_;
  const Transport& transport_;
};

class ThreadsCommunicator final : public Communicator {
 public:
  ThreadsCommunicator(std::string name, std::vector<int> ranks, int rank, const std::shared_ptr<Hub>& hub, std::shared_ptr<Group> group,
                      const Transport& transport)
      : Communicator(std::move(name), std::move(ranks), rank), group_(std::move(group)), transport_(transport),
        sharing_(std::make_shared<ProcessSharing>(hub, this->ranks(), transport)) {
    for (int i = 0; i < size(); ++i) everyone_.push_back(i);
  }

  std::shared_ptr<MemorySharing> memory_sharing() override { return sharing_; }

 private:
  Async do_all_reduce(const Call& call, const at::Tensor& input, at::Tensor result) override {
    return meet(call, input, std::move(result), {}, {});
  }

  Async do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override {
    return meet(call, input, std::move(result), counts, {});
  }

  Async do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override {
    return meet(call, input, std::move(result), counts, {});
  }

  Async do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) override {
    return meet(call, input, empty({sum(recv)}, input.scalar_type()), send, recv);
  }

  Async do_broadcast(const Call& call, const at::Tensor& input) override {
    return meet(call, input, empty(input.sizes(), input.scalar_type()), {}, {});
  }

  Async do_send(const Call& call, const at::Tensor& input) override {
    require_cpu(call.kind, input, "threads");
    const bool buffered = static_cast<int64_t>(input.nbytes()) <= kBufferedSendBytes;
    at::Tensor message = input;
    if (buffered) {
      message = empty(input.sizes(), input.scalar_type());
      if (input.numel() > 0) std::memcpy(message.data_ptr(), input.data_ptr(), input.nbytes());
    }
    auto work = meet_peer(call, {rank(), call.root, call.tag, call.sequence}, 0, message, at::Tensor());
    return buffered ? Async{} : Async{at::Tensor(), std::move(work)};
  }

  Async do_recv(const Call& call, const at::Tensor& like) override {
    at::Tensor result = empty(like.sizes(), like.scalar_type());
    auto work = meet_peer(call, {call.root, rank(), call.tag, call.sequence}, 1, at::Tensor(), result);
    return {result, std::move(work)};
  }

  void do_barrier(const Call& call) override { meet(call, at::Tensor(), at::Tensor(), {}, {}).work->wait(); }

  Async meet(const Call& call, const at::Tensor& input, at::Tensor result, Counts send, Counts recv) {
    Entry entry = make_entry(call, input, result);
    entry.send = send.vec();
    entry.recv = recv.vec();
    auto slot = group_->post({-1, -1, 0, call.sequence}, everyone_, rank(), std::move(entry));
    return {std::move(result), make_work(std::move(slot), call)};
  }

  WorkPtr meet_peer(const Call& call, const SlotKey& key, int member, const at::Tensor& input, const at::Tensor& result) {
    return make_work(group_->post(key, {key.from, key.to}, member, make_entry(call, input, result)), call);
  }

  Entry make_entry(const Call& call, const at::Tensor& input, const at::Tensor& result) const {
    const at::Tensor& sized = input.defined() ? input : result;
    Entry entry;
    entry.call = call;
    if (call.failures != 0) [[unlikely]] entry.failed = transport_.failed_operators()->reason();
    if (sized.defined()) require_cpu(call.kind, sized, "threads");
    entry.input = input;
    entry.result = result;
    entry.in = input.defined() ? input.data_ptr() : nullptr;
    entry.out = result.defined() ? result.data_ptr() : nullptr;
    return entry;
  }

  WorkPtr make_work(std::shared_ptr<Slot> slot, const Call& call) const {
    return c10::make_intrusive<SlotWork>(group_, std::move(slot), call, name(), transport_.deadline());
  }

  static int64_t sum(Counts counts) {
    int64_t total = 0;
    for (int64_t count : counts) total += count;
    return total;
  }

  std::shared_ptr<Group> group_;
  const Transport& transport_;
  const std::shared_ptr<ProcessSharing> sharing_;
  std::vector<int> everyone_;
};

class ThreadsTransport final : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~ThreadsTransport() override { leave(""); }

  std::string_view name() const override { return "threads"; }
  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }

  std::shared_ptr<Communicator> do_connect(const std::string& name, const std::vector<int>& ranks, int nth) override {
    const int position = position_in(name, ranks, rank_, size());
    return std::make_shared<ThreadsCommunicator>(name, ranks, position, hub_, hub_->group(name, ranks, nth), *this);
  }

  void leave(const std::string& why) override {
    if (!left_) hub_->leave(rank_, why);
    left_ = true;
  }

 private:
  std::shared_ptr<Hub> hub_;
  const int rank_;
  bool left_ = false;
};

}  // namespace

}  // namespace threads

std::vector<std::unique_ptr<Transport>> make_threads_transports(int size) {
  require(size > 0, "make_threads_transports", "got {} ranks; expected at least 1", size);
  auto hub = std::make_shared<threads::Hub>(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) transports.push_back(std::make_unique<threads::ThreadsTransport>(hub, rank));
  return transports;
}

namespace {

const RegisterTransport of_threads({.name = "threads", .threads = [](const ThreadsJob& job) {
  auto ranks = std::make_shared<std::vector<std::unique_ptr<Transport>>>(make_threads_transports(job.ranks));
  return [ranks](int rank) { return std::move((*ranks)[rank]); };
}});

}  // namespace

}  // namespace dtensor::comm
