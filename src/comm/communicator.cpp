// The public functions of Communicator: they check the arguments, number the call, make its event, and call the transport.
#include <dtensor/comm/communicator.hpp>
#include <dtensor/comm/transport.hpp>

#include <dtensor/base/error.hpp>

#include "src/comm/describe.hpp"
#include "src/comm/failed_operators.hpp"
#include "src/comm/memory_sharing.hpp"
#include "src/comm/reduce.hpp"

#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace dtensor::comm {

namespace {

int64_t total(Counts counts) { return c10::sum_integers(counts); }

void check_input(Collective kind, const at::Tensor& input) {
  require(input.defined(), name(kind), "the input is an undefined tensor");
  require(input.has_storage(), name(kind), "the input has no storage; got a distributed or meta tensor; "
          "expected a plain tensor; hint: pass to_local()");
  require(input.is_contiguous(), name(kind), "the input is not contiguous; got sizes [{}] and strides [{}]; hint: call contiguous()",
          fmt::join(input.sizes(), ", "), fmt::join(input.strides(), ", "));
  require(!input.is_conj() && !input.is_neg(), name(kind),
          "the input is a lazy conjugate or negative; hint: call resolve_conj() and resolve_neg()");
}

void check_counts(Collective kind, Counts counts, size_t group, const char* what) {
  require(counts.size() == group, name(kind), "{} has the wrong length; got {} counts; expected one per rank of the group ({})",
          what, counts.size(), group);
  for (int64_t count : counts) require(count >= 0, name(kind), "{} has a negative count; got [{}]", what, fmt::join(counts, ", "));
}

void check_total(Collective kind, Counts counts, int64_t numel, const char* what) {
  require(total(counts) == numel, name(kind), "{} do not add up to the input; got [{}] (sum {}); expected the input's {} elements",
          what, fmt::join(counts, ", "), total(counts), numel);
}

// Where `count` elements are to go.
at::Tensor result_in(Collective kind, const at::Tensor& input, int64_t count, at::Tensor into) {
  if (!into.defined()) return empty_for(input, {count});
  require(into.dim() == 1 && into.numel() == count && into.is_contiguous() && into.scalar_type() == input.scalar_type() &&
              into.device() == input.device(),
          name(kind), "the result does not fit into the tensor given for it; got {} [{}] on {}; expected {} [{}] on {}, contiguous",
          c10::toString(into.scalar_type()), fmt::join(into.sizes(), ", "), into.device().str(), c10::toString(input.scalar_type()), count,
          input.device().str());
  return into;
}

// In a group of one nothing is communicated: the result is the input's copy.
Async copy_of(const at::Tensor& input, c10::IntArrayRef sizes, at::Tensor result = {}) {
  if (!result.defined()) result = empty_for(input, sizes);
  if (input.numel() > 0 && !input.is_meta()) copy(result, input);
  return {result, {}};
}

// Asks the transport, and marks the event where it does not.
template <class Ask>
Async run(const Communicator::Call& call, Ask ask) {
  try {
    Async result = ask();
    if (!result.work) call.event.done();
    return result;
  } catch (...) {
    call.event.failed();
    throw;
  }
}

}  // namespace

Communicator::Communicator(std::string name, std::vector<int> ranks, int rank)
    : name_(std::move(name)), ranks_(std::move(ranks)), rank_(rank) {
  require(rank_ >= 0 && rank_ < size(), "connect", "the calling rank is not in group '{}'; got ranks [{}]", name_, fmt::join(ranks_, ", "));
  auto sorted = ranks_;
  std::ranges::sort(sorted);
  require(std::ranges::adjacent_find(sorted) == sorted.end(), "connect",
          "group '{}' has a rank twice; got ranks [{}]", name_, fmt::join(ranks_, ", "));
}

void Communicator::record_in(Events events) {
  events_ = std::make_unique<Events>(std::move(events));
  group_index_ = events_->add_group(name_, ranks_);
}

Transport::Transport() : failed_(std::make_shared<FailedOperators>()) {}

std::shared_ptr<Communicator> Transport::connect(const std::string& name, const std::vector<int>& ranks) {
  auto communicator = do_connect(name, ranks, connected_[{name, ranks}]++);
  communicator->tell_failures(failed_);
  if (events_) communicator->record_in(*events_);
  return communicator;
}

Communicator::Call Communicator::begin(CallInfo call, uint64_t& sequence, const at::Tensor& input, Counts counts) {
  call.sequence = ++sequence;
  if (input.defined()) {
    call.dtype = static_cast<int8_t>(input.scalar_type());
    call.numel = input.numel();
  }
  if (!counts.empty()) call.counts_hash = hash_counts(counts);
  if (failed_) call.failures = failed_->summary(ranks_);
  describe_purpose(call);
  return {call, issue(call, input)};
}

Communicator::Call Communicator::begin(const CallInfo& call, const at::Tensor& input, Counts counts) {
  return begin(call, sequence_, input, counts);
}

// Only the two ends take part in a message, so messages are numbered per peer and tag, apart from collectives.
Communicator::Call Communicator::begin_message(Collective kind, const at::Tensor& input, int peer, int tag) {
  require(size() > 1, comm::name(kind), "got peer {}; group '{}' has one rank, and so no peers", peer, name_);
  require(peer >= 0 && peer < size() && peer != rank_, comm::name(kind),
          "the peer is not another rank of group '{}'; got {}; expected 0..{} other than {}", name_, peer, size() - 1, rank_);
  check_input(kind, input);
  auto& sequences = kind == Collective::send ? sent_ : received_;
  return begin({.kind = kind, .root = peer, .tag = tag}, sequences[{peer, tag}], input, {});
}

EventRef Communicator::issue(const CallInfo& call, const at::Tensor& input) {
  if (!events_) return {};
  Event event;
  event.kind = call.kind;
  event.sequence = call.sequence;
  event.reduce = call.op;
  event.root = call.root;
  event.tag = call.tag;
  event.numel = call.numel;
  event.dtype = call.dtype;
  event.bytes = input.defined() ? static_cast<int64_t>(input.nbytes()) : 0;
  event.counts = call.counts_hash;
  event.group_index = group_index_;
  event.group_size = size();
  event.group = name_;
  event.op = Cause::op();
  event.module = Cause::module();
  event.implicit = Cause::implicit();
  return events_->issue(event);
}

Async Communicator::all_reduce(const at::Tensor& input, ReduceOp op, bool in_place) {
  check_input(Collective::all_reduce, input);
  check_reducible("all_reduce", input.scalar_type(), op);
  if (size() == 1) return in_place ? Async{input, {}} : copy_of(input, input.sizes());
  const Call call = begin({.kind = Collective::all_reduce, .op = op}, input);
  return run(call, [&] { return do_all_reduce(call, input, in_place ? input : empty_for(input, input.sizes())); });
}

Async Communicator::all_gather(const at::Tensor& input, Counts counts, at::Tensor into) {
  check_input(Collective::all_gather, input);
  check_counts(Collective::all_gather, counts, ranks_.size(), "counts");
  require(counts[rank_] == input.numel(), "all_gather", "this rank's count is not its input's; got counts [{}] at position {}; expected {}",
          fmt::join(counts, ", "), rank_, input.numel());
  auto result = result_in(Collective::all_gather, input, total(counts), std::move(into));
  if (size() == 1) return copy_of(input, {input.numel()}, std::move(result));
  const Call call = begin({.kind = Collective::all_gather}, input, counts);
  return run(call, [&] { return do_all_gather(call, input, counts, std::move(result)); });
}

Async Communicator::reduce_scatter(const at::Tensor& input, Counts counts, ReduceOp op, at::Tensor into) {
  check_input(Collective::reduce_scatter, input);
  check_reducible("reduce_scatter", input.scalar_type(), op);
  check_counts(Collective::reduce_scatter, counts, ranks_.size(), "counts");
  check_total(Collective::reduce_scatter, counts, input.numel(), "counts");
  auto result = result_in(Collective::reduce_scatter, input, counts[rank_], std::move(into));
  if (size() == 1) return copy_of(input, {input.numel()}, std::move(result));
  const Call call = begin({.kind = Collective::reduce_scatter, .op = op}, input, counts);
  return run(call, [&] { return do_reduce_scatter(call, input, counts, std::move(result)); });
}

Async Communicator::all_to_all(const at::Tensor& input, Counts send, Counts recv) {
  check_input(Collective::all_to_all, input);
  check_counts(Collective::all_to_all, send, ranks_.size(), "send counts");
  check_counts(Collective::all_to_all, recv, ranks_.size(), "recv counts");
  check_total(Collective::all_to_all, send, input.numel(), "send counts");
  require(send[rank_] == recv[rank_], "all_to_all", "this rank's piece for itself has two sizes; got send {} and recv {}", send[rank_],
          recv[rank_]);
  if (size() == 1) return copy_of(input, {input.numel()});
  const Call call = begin({.kind = Collective::all_to_all}, input);
  return run(call, [&] { return do_all_to_all(call, input, send, recv); });
}

Async Communicator::broadcast(const at::Tensor& input, int root) {
  check_input(Collective::broadcast, input);
  require(root >= 0 && root < size(), "broadcast", "the root is not in group '{}'; got {}; expected 0..{}", name_, root, size() - 1);
  if (size() == 1) return copy_of(input, input.sizes());
  const Call call = begin({.kind = Collective::broadcast, .root = root}, input);
  return run(call, [&] { return do_broadcast(call, input); });
}

Async Communicator::send(const at::Tensor& input, int to, int tag) {
  const Call call = begin_message(Collective::send, input, to, tag);
  return run(call, [&] { return do_send(call, input); });
}

Async Communicator::recv(const at::Tensor& like, int from, int tag) {
  const Call call = begin_message(Collective::recv, like, from, tag);
  return run(call, [&] { return do_recv(call, like); });
}

void Communicator::barrier() {
  if (size() == 1) return;
  const Call call = begin({.kind = Collective::barrier}, at::Tensor());
  run(call, [&] { return do_barrier(call), Async(); });
}

std::shared_ptr<void> Communicator::register_memory(const at::Tensor&) { return nullptr; }

std::shared_ptr<MemorySharing> Communicator::memory_sharing() { return nullptr; }

}  // namespace dtensor::comm
