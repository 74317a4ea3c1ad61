// Issues collectives on a stream of their own, between events of the caller's stream.
#include "src/comm/transports/nccl/communicator.hpp"

#include "src/comm/transports/nccl/plan.hpp"
#include "src/comm/reduce.hpp"

#include <dtensor/base/error.hpp>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

namespace dtensor::comm::nccl {

namespace {

// Of the rounds before a group's first call, in which its ranks agree on an id.
constexpr uint64_t kBeforeFirst = 0;

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value && std::strcmp(value, "0") != 0;
}

ncclDataType_t type_of(Wire wire) {
  switch (wire) {
    case Wire::int8: return ncclInt8;
    case Wire::uint8: return ncclUint8;
    case Wire::int32: return ncclInt32;
    case Wire::int64: return ncclInt64;
    case Wire::float16: return ncclFloat16;
    case Wire::bfloat16: return ncclBfloat16;
    case Wire::float32: return ncclFloat32;
    case Wire::float64: return ncclFloat64;
  }
  return ncclUint8;
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::avg: return ncclAvg;
    case ReduceOp::product: return ncclProd;
    case ReduceOp::min: return ncclMin;
    case ReduceOp::max: return ncclMax;
    case ReduceOp::sum:
    case ReduceOp::norm2: break;  // Communicator refuses norm2
  }
  return ncclSum;
}

char* address(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

size_t bytes(const at::Tensor& tensor, int64_t count) { return static_cast<size_t>(count) * tensor.element_size(); }

// Makes one call after the other until one fails.
template <class F>
ncclResult_t each(const std::vector<Piece>& pieces, F call) {
  for (const auto& piece : pieces) {
    if (const auto result = call(piece); has_failed(result)) return result;
  }
  return ncclSuccess;
}

c10::Stream current_stream(int device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)});
}

// Gives up when the work cannot begin.
Check giving_up(std::shared_ptr<Session> session, std::shared_ptr<const Pending> work) {
  const auto end = Clock::now() + session->watchdog.transport().deadline();
  return [session = std::move(session), work = std::move(work), end] {
    session->watchdog.check(*work);
    auto why = session->watchdog.obstacle(work->peers, work->stream, work->call.sequence);
    if (Clock::now() > end) why = "NCCL did not begin it within the deadline";
    if (why) throw Channel::Broken{*why};
  };
}

// Enqueues the work on its channel's stream, where it waits for what its caller had issued. When NCCL fails here it will do so for every
// later call too: the job is broken.
void put_on_stream(const std::shared_ptr<Session>& session, const std::shared_ptr<Pending>& work, const Channel::Enqueue& enqueue) {
  const auto& side = work->channel->stream();
  work->ready.block(side);
  try {
    if (enqueue) work->channel->run(enqueue, giving_up(session, work));
  } catch (const Channel::Broken& broken) {
    work->call.event.failed();
    session->watchdog.break_off(session->watchdog.explain(*work, broken.why));
  }
  work->done.record(side);
  session->watchdog.watch(work);
}

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<Pending> work, std::shared_ptr<Session> session) : work_(std::move(work)), session_(std::move(session)) {}

  // The host does not wait (but at the first message of two ranks, until they are connected): the current stream does. Memory that is
  // freed then is used again by what comes later on its stream; where that is not the stream that waits here, it is kept until the device
  // is done.
  void wait() override {
    static const bool blocks = is_set("DTENSOR_BLOCKING_WAIT");
    work_->begun.wait(false);
    while (blocks && !session_->watchdog.is_broken() && !work_->done.query()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    session_->watchdog.check(*work_);
    const auto stream = current_stream(session_->device);
    work_->done.block(stream);
    if (stream != *work_->issued_on) return;
    session_->watchdog.release(*work_);
    waited_ = true;
  }

  // To the stream that has waited it is done.
  bool done() override {
    if (session_->watchdog.is_broken() || (waited_ && current_stream(session_->device) == *work_->issued_on)) return true;
    if (!work_->begun || !work_->done.query()) return false;
    session_->watchdog.release(*work_);
    return true;
  }

 private:
  std::shared_ptr<Pending> work_;
  std::shared_ptr<Session> session_;
  std::atomic<bool> waited_{false};
};

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<Communicator> host, uint64_t id, std::shared_ptr<Session> session)
    : Communicator(host->name(), host->ranks(), host->rank()), host_(std::move(host)), id_(id), session_(std::move(session)) {
  std::ranges::copy_if(ranks(), std::back_inserter(peers_), [this](int rank) { return rank != session_->rank; });
}

Async NcclCommunicator::do_all_reduce(const Call& call, const at::Tensor& input, at::Tensor result) {
  if (goes_over_host(call, input)) return host_->do_all_reduce(call, input, std::move(result));
  const auto how = reduction_of(call.kind, input.scalar_type(), call.op);
  return collective(call, input, result, [&](ncclComm_t comm, cudaStream_t stream) {
    const auto count = static_cast<size_t>(input.numel() * how.width);
    return ncclAllReduce(input.data_ptr(), result.data_ptr(), count, type_of(how.type), op_of(how.op), comm, stream);
  });
}

Async NcclCommunicator::do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) {
  if (goes_over_host(call, input)) return host_->do_all_gather(call, input, counts, std::move(result));
  return collective(call, input, result, [&](ncclComm_t comm, cudaStream_t stream) {
    if (are_equal(counts)) return ncclAllGather(input.data_ptr(), result.data_ptr(), bytes(input, counts[0]), ncclUint8, comm, stream);
    return each(pieces_of(counts), [&](const Piece& piece) {
      char* target = address(result, piece.offset);
      const void* source = piece.peer == rank() ? input.data_ptr() : target;
      return ncclBroadcast(source, target, bytes(input, piece.count), ncclUint8, piece.peer, comm, stream);
    });
  });
}

Async NcclCommunicator::do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) {
  if (goes_over_host(call, input)) return host_->do_reduce_scatter(call, input, counts, std::move(result));
  const auto how = reduction_of(call.kind, input.scalar_type(), call.op);
  return collective(call, input, result, [&](ncclComm_t comm, cudaStream_t stream) {
    const auto type = type_of(how.type);
    const auto op = op_of(how.op);
    const auto numbers = [&](int64_t count) { return static_cast<size_t>(count * how.width); };
    if (are_equal(counts)) return ncclReduceScatter(input.data_ptr(), result.data_ptr(), numbers(counts[0]), type, op, comm, stream);
    return each(pieces_of(counts), [&](const Piece& piece) {
      void* target = piece.peer == rank() ? result.data_ptr() : nullptr;
      return ncclReduce(address(input, piece.offset), target, numbers(piece.count), type, op, piece.peer, comm, stream);
    });
  });
}

Async NcclCommunicator::do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) {
  if (goes_over_host(call, input)) return host_->do_all_to_all(call, input, send, recv);
  int64_t total = 0;
  for (const auto count : recv) total += count;
  const auto result = empty_for(input, {total});
  return collective(call, input, result, [&](ncclComm_t comm, cudaStream_t stream) {
    const auto sent = each(pieces_of(send), [&](const Piece& piece) {
      return ncclSend(address(input, piece.offset), bytes(input, piece.count), ncclUint8, piece.peer, comm, stream);
    });
    if (has_failed(sent)) return sent;
    return each(pieces_of(recv), [&](const Piece& piece) {
      return ncclRecv(address(result, piece.offset), bytes(input, piece.count), ncclUint8, piece.peer, comm, stream);
    });
  });
}

Async NcclCommunicator::do_broadcast(const Call& call, const at::Tensor& input) {
  if (goes_over_host(call, input)) return host_->do_broadcast(call, input);
  const auto result = empty_for(input, input.sizes());
  return collective(call, input, result, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(input.data_ptr(), result.data_ptr(), input.nbytes(), ncclUint8, call.root, comm, stream);
  });
}

// A small message is copied, so that the caller may go on before the receiver comes.
Async NcclCommunicator::do_send(const Call& call, const at::Tensor& input) {
  if (goes_over_host(call, input)) return host_->do_send(call, input);
  if (static_cast<int64_t>(input.nbytes()) > kBufferedSendBytes) return {{}, message(call, input, true).work};
  const auto copied = empty_for(input, input.sizes());
  if (input.numel() > 0) copy(copied, input);
  message(call, copied, true);
  return {};
}

Async NcclCommunicator::do_recv(const Call& call, const at::Tensor& like) {
  if (goes_over_host(call, like)) return host_->do_recv(call, like);
  return message(call, empty_for(like, like.sizes()), false);
}

// Of the hosts: what runs on the devices is not waited for.
void NcclCommunicator::do_barrier(const Call& call) { host_->do_barrier(call); }

bool NcclCommunicator::goes_over_host(const Call& call, const at::Tensor& tensor) const {
  if (tensor.is_cpu()) return true;
  if (!tensor.is_cuda() || tensor.get_device() != session_->device) {
    fail(comm::name(call.kind),
         "the nccl transport of rank {} moves tensors on cuda:{} and on the CPU; got one on {}; hint: each process has one GPU; "
         "make tensors on the device \"cuda\", without an index",
         session_->rank, session_->device, tensor.device().str());
  }
  return false;
}

std::shared_ptr<Channel> NcclCommunicator::make_channel(Communicator& host, int device, const Check& check) {
  ncclUniqueId id{};
  if (host.rank() == 0) id = make_unique_id();
  if (host.size() > 1) {
    const auto bytes = empty({static_cast<int64_t>(sizeof id)}, c10::ScalarType::Byte);
    std::memcpy(bytes.data_ptr(), &id, sizeof id);
    const auto received = host.do_broadcast(Call{{.kind = Collective::broadcast, .sequence = kBeforeFirst}}, bytes).get();
    std::memcpy(&id, received.data_ptr(), sizeof id);
  }
  return Channel::make(id, host.size(), host.rank(), device, check);
}

// All ranks of the group make a collective, so that here they all are. A group of the whole world in its order is split from the one
// that there is. Others are not split off: that would be a call of every rank, and the others need not make it.
std::shared_ptr<Channel> NcclCommunicator::channel(const CallInfo& call) {
  std::lock_guard lock(mutex_);
  if (channel_) return channel_;
  const auto end = Clock::now() + session_->watchdog.transport().deadline();
  const auto check = [&] {
    session_->watchdog.check(call, name());
    auto why = session_->watchdog.obstacle(peers_, id_, kBeforeFirst);
    if (Clock::now() > end) why = "NCCL did not set up the group within the deadline";
    if (why) fail(comm::name(call.kind), "{}", failure(call, name(), *why));
  };
  const auto& world = session_->world;
  const bool is_world = size() == session_->watchdog.transport().size() && std::ranges::is_sorted(ranks());
  channel_ = world && is_world ? world->split(check) : make_channel(*host_, session_->device, check);
  session_->watchdog.add(channel_);
  return channel_;
}

// With DTENSOR_CHECK_CALLS ranks compare what they call, over the host: NCCL itself compares nothing.
void NcclCommunicator::compare(const CallInfo& mine) {
  static const bool compares = is_set("DTENSOR_CHECK_CALLS");
  if (!compares) return;
  const auto bytes = empty({static_cast<int64_t>(sizeof mine)}, c10::ScalarType::Byte);
  std::memcpy(bytes.data_ptr(), &mine, sizeof mine);
  const std::vector<int64_t> counts(size(), bytes.numel());
  const Call round{{.kind = Collective::all_gather, .sequence = mine.sequence, .numel = bytes.numel(), .failures = mine.failures}};
  const auto all = host_->do_all_gather(round, bytes, counts, empty({size() * bytes.numel()}, c10::ScalarType::Byte)).get();
  for (int member = 0; member < size(); ++member) {
    CallInfo other;
    std::memcpy(&other, static_cast<const char*>(all.data_ptr()) + member * sizeof other, sizeof other);
    if (!mine.agrees_with(other))
      fail(comm::name(mine.kind), "{}", failure(mine, name(), divergence(session_->rank, mine, ranks()[member], other)));
  }
}

Async NcclCommunicator::collective(const Call& call, const at::Tensor& input, const at::Tensor& result, const Channel::Enqueue& enqueue) {
  auto work = std::make_shared<Pending>();
  work->call = call;
  work->group = name();
  work->peers = peers_;
  work->stream = id_;
  session_->watchdog.check(*work);
  compare(call);
  work->channel = channel(work->call);
  work->keep = {input, result};
  session_->control->made(id_, call.sequence);
  const bool is_empty = input.numel() == 0 && result.numel() == 0;
  return {result, issue(std::move(work), is_empty ? Channel::Enqueue() : enqueue)};
}

// It begins in the thread that connects the two, where that goes on.
Async NcclCommunicator::message(const Call& call, const at::Tensor& tensor, bool sends) {
  check_tag(call.kind, call.tag);
  const int peer = ranks()[call.root], from = sends ? session_->rank : peer, to = sends ? peer : session_->rank;
  auto work = std::make_shared<Pending>();
  work->call = call;
  work->group = name();
  work->peers = {peer};
  work->stream = hash_counts({static_cast<int64_t>(id_), from, to});
  work->keep = {tensor};
  session_->watchdog.check(*work);
  session_->control->made(work->stream, call.sequence);
  work->issued_on = current_stream(session_->device);
  work->ready.record(*work->issued_on);
  auto& pair = pair_with(peer, work);
  const auto enqueue = [sends, tensor, at = pair.position_of_peer()](ncclComm_t comm, cudaStream_t stream) {
    return sends ? ncclSend(tensor.data_ptr(), tensor.nbytes(), ncclUint8, at, comm, stream)
                 : ncclRecv(tensor.data_ptr(), tensor.nbytes(), ncclUint8, at, comm, stream);
  };
  pair.run(sends, [session = session_, work, enqueue, is_empty = tensor.numel() == 0](const std::shared_ptr<Channel>& channel) {
    work->channel = channel;
    try {
      if (channel) put_on_stream(session, work, is_empty ? Channel::Enqueue() : enqueue);
    } catch (const c10::Error&) {  // the job is broken, which the next call or wait throws
    }
    work->begun = true;
    work->begun.notify_all();
  });
  session_->watchdog.check(*work);
  return {tensor, c10::make_intrusive<NcclWork>(std::move(work), session_)};
}

// The two connect on the occasion of the first message.
Pair& NcclCommunicator::pair_with(int peer, const std::shared_ptr<Pending>& first) {
  std::lock_guard lock(session_->mutex);
  const auto found = session_->pairs.find(peer);
  if (found != session_->pairs.end()) return found->second;
  auto& watchdog = session_->watchdog;
  const auto made = [&watchdog](const std::shared_ptr<Channel>& channel) { watchdog.add(channel); };
  const auto failed = [&watchdog](const std::string& why) { watchdog.break_off(why); };
  const Pair::Ends ends{session_->everyone, session_->rank, peer, session_->device};
  return session_->pairs.try_emplace(peer, ends, giving_up(session_, first), made, failed).first->second;
}

WorkPtr NcclCommunicator::issue(std::shared_ptr<Pending> work, const Channel::Enqueue& enqueue) {
  work->issued_on = current_stream(session_->device);
  work->ready.record(*work->issued_on);
  put_on_stream(session_, work, enqueue);
  work->begun = true;
  session_->watchdog.check(*work);
  return c10::make_intrusive<NcclWork>(std::move(work), session_);
}

std::shared_ptr<void> NcclCommunicator::register_memory(const at::Tensor& tensor) {
  if (size() == 1 || !tensor.is_cuda() || tensor.nbytes() == 0) return nullptr;
  CallInfo call;
  const auto end = Clock::now() + session_->watchdog.transport().deadline();
  const auto channel = this->channel(call);
  void* handle = channel->add_memory(tensor.data_ptr(), tensor.nbytes(), [&] {
    session_->watchdog.check(call, name());
    if (Clock::now() > end) fail("register_memory", "NCCL did not register memory of group '{}' within the deadline", name());
  });
  if (!handle) return nullptr;
  return {handle, [weak = std::weak_ptr<Channel>(channel)](void* registered) {
            if (const auto alive = weak.lock()) alive->remove_memory(registered);
          }};
}

}  // namespace dtensor::comm::nccl
