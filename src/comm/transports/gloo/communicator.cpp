// Implements collectives as exchanges with every peer.
#include "src/comm/transports/gloo/communicator.hpp"

#include "src/comm/reduce.hpp"

#include <cstring>

namespace dtensor::comm::gloo {

namespace {

// Up to this size every rank sends its whole input to all and reduces by itself: one exchange instead of two.
constexpr int64_t kDirectBytes = 16 << 10;

int64_t offset(Counts counts, int position) {
  int64_t sum = 0;
  for (int i = 0; i < position; ++i) sum += counts[i];
  return sum;
}

Bytes part_of(const at::Tensor& tensor, int64_t begin, int64_t count) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  return {static_cast<char*>(tensor.data_ptr()) + begin * size, count * size};
}

void copy(Bytes to, Bytes from) {
  if (from.size > 0) std::memcpy(to.data, from.data, from.size);
}

}  // namespace

Async GlooCommunicator::do_all_reduce(const Call& call, const at::Tensor& input, at::Tensor result) {
  if (static_cast<int64_t>(input.nbytes()) <= kDirectBytes) {
    const std::vector<int64_t> whole(size(), input.numel());
    return reduce_pieces(call, input, whole, result, part_of(result, 0, input.numel()), false);
  }
  std::vector<int64_t> counts(size());
  for (int i = 0; i < size(); ++i) counts[i] = input.numel() * (i + 1) / size() - input.numel() * i / size();
  return reduce_pieces(call, input, counts, result, part_of(result, offset(counts, rank()), counts[rank()]), true);
}

Async GlooCommunicator::do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) {
  return reduce_pieces(call, input, counts, result, part_of(result, 0, counts[rank()]), false);
}

// Every peer gets its piece of the input, or the whole input when all counts are its size; the pieces for this rank are
// reduced into `target`, a part of `result`. With `share` all ranks' shards are then gathered.
Async GlooCommunicator::reduce_pieces(const Call& call, const at::Tensor& input, Counts counts, const at::Tensor& result, Bytes target,
                                      bool share) {
  const bool whole = call.kind == Collective::all_reduce && !share;
  const int64_t mine = counts[rank()];
  const auto piece = [&](int member) { return part_of(input, whole ? 0 : offset(counts, member), counts[member]); };
  at::Tensor incoming = empty({(size() - 1) * mine}, input.scalar_type());
  auto job = start(call, input);
  c10::SmallVector<const void*, 16> inputs;
  for (int member = 0, slot = 0; member < size(); ++member) {
    const Bytes in = member == rank() ? piece(member) : part_of(incoming, slot++ * mine, mine);
    inputs.push_back(in.data);
    if (member == rank()) continue;
    job->first.add(ranks()[member], piece(member), in);
    if (share) job->second.add(ranks()[member], target, part_of(result, offset(counts, member), counts[member]));
  }
  job->after_first = [inputs, target, mine, dtype = input.scalar_type(), op = call.op] { reduce(dtype, op, target.data, inputs, mine); };
  job->has_second = share;
  job->keep = {input, result, incoming};
  return finish(std::move(job), result, collectives_, share);
}

Async GlooCommunicator::do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) {
  auto job = start(call, input);
  const Bytes mine = part_of(input, 0, input.numel());
  for (int member = 0; member < size(); ++member) {
    const Bytes target = part_of(result, offset(counts, member), counts[member]);
    if (member == rank()) {
      copy(target, mine);
    } else {
      job->first.add(ranks()[member], mine, target);
    }
  }
  job->keep = {input, result};
  return finish(std::move(job), result, collectives_, false);
}

Async GlooCommunicator::do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) {
  at::Tensor result = empty({offset(recv, size())}, input.scalar_type());
  auto job = start(call, input);
  for (int member = 0; member < size(); ++member) {
    const Bytes out = part_of(input, offset(send, member), send[member]), in = part_of(result, offset(recv, member), recv[member]);
    if (member == rank()) {
      copy(in, out);
    } else {
      job->first.add(ranks()[member], out, in);
    }
  }
  job->keep = {input, result};
  return finish(std::move(job), result, collectives_, false);
}

Async GlooCommunicator::do_broadcast(const Call& call, const at::Tensor& input) {
  at::Tensor result = empty(input.sizes(), input.scalar_type());
  auto job = start(call, input);
  const Bytes mine = part_of(input, 0, input.numel()), target = part_of(result, 0, input.numel());
  if (rank() == call.root) copy(target, mine);
  for (int member = 0; member < size(); ++member) {
    if (member == rank()) continue;
    job->first.add(ranks()[member], rank() == call.root ? mine : Bytes{}, member == call.root ? target : Bytes{});
  }
  job->keep = {input, result};
  return finish(std::move(job), result, collectives_, false);
}

Async GlooCommunicator::do_send(const Call& call, const at::Tensor& input) {
  require_cpu(call.kind, input, "gloo");
  const bool buffered = static_cast<int64_t>(input.nbytes()) <= kBufferedSendBytes;
  at::Tensor message = input;
  if (buffered) {
    message = empty(input.sizes(), input.scalar_type());
    copy(part_of(message, 0, message.numel()), part_of(input, 0, input.numel()));
  }
  auto job = start_message(call, input, rank(), call.root);
  job->first.add(ranks()[call.root], part_of(message, 0, message.numel()), {}, Exchange::Direction::send);
  job->keep = {message};
  if (!buffered) return finish_message(std::move(job), at::Tensor());
  job->post();
  if (job->claim()) messages_->buffered_sends.add(std::move(job));
  return {};
}

Async GlooCommunicator::do_recv(const Call& call, const at::Tensor& like) {
  at::Tensor result = empty(like.sizes(), like.scalar_type());
  auto job = start_message(call, like, call.root, rank());
  job->first.add(ranks()[call.root], {}, part_of(result, 0, result.numel()), Exchange::Direction::receive);
  job->keep = {result};
  return finish_message(std::move(job), result);
}

void GlooCommunicator::do_barrier(const Call& call) {
  auto job = start(call, at::Tensor());
  for (int member = 0; member < size(); ++member) {
    if (member != rank()) job->first.add(ranks()[member], {}, {});
  }
  finish(std::move(job), at::Tensor(), collectives_, false).work->wait();
}

const Communicator::Call& GlooCommunicator::announce(const Call& call, const at::Tensor& input, std::string_view transport) {
  if (input.defined()) require_cpu(call.kind, input, transport);
  link_->made(id_, call.sequence);
  return call;
}

std::shared_ptr<Job> GlooCommunicator::start(const Call& call, const at::Tensor& input) {
  return std::make_shared<Job>(link_, announce(call, input, "gloo"), id_, name(), transport_.rank(), transport_.deadline());
}

// Both ends use one stream, and each notes its own progress in it.
std::shared_ptr<Job> GlooCommunicator::start_message(const Call& call, const at::Tensor& tensor, int from, int to) {
  const uint64_t stream =
      mix(mix(mix(id_, 1 + static_cast<uint64_t>(from)), 1 + static_cast<uint64_t>(to)), static_cast<uint64_t>(call.tag));
  require_cpu(call.kind, tensor, "gloo");
  link_->made(stream, call.sequence);
  return std::make_shared<Job>(link_, call, stream, name(), transport_.rank(), transport_.deadline());
}

Async GlooCommunicator::finish(std::shared_ptr<Job> job, const at::Tensor& result, std::shared_ptr<Worker> worker, bool in_background) {
  job->post();
  if (in_background && job->claim()) worker->add(job);
  return {result, c10::make_intrusive<JobWork>(std::move(job), std::move(worker))};
}

Async GlooCommunicator::finish_message(std::shared_ptr<Job> job, const at::Tensor& result) const {
  return finish(std::move(job), result, std::shared_ptr<Worker>(messages_, &messages_->others), false);
}

}  // namespace dtensor::comm::gloo
