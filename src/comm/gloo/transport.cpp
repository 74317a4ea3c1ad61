// The gloo transport: ranks are processes, on one host or several.
#include <dtensor/error.hpp>

#include "src/comm/control.hpp"
#include "src/comm/gloo/job.hpp"
#include "src/comm/reduce.hpp"

#include <cstring>

namespace dtensor::comm {

namespace gloo {

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

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(std::string name, std::vector<int> ranks, int rank, uint64_t id, std::shared_ptr<Link> link,
                   std::shared_ptr<Worker> collectives, std::shared_ptr<Worker> messages, const Transport& transport)
      : Communicator(std::move(name), std::move(ranks), rank),
        id_(id), link_(std::move(link)), collectives_(std::move(collectives)), messages_(std::move(messages)), transport_(transport) {}

 private:
  Async do_all_reduce(const Call& call, const at::Tensor& input) override {
    at::Tensor result = empty(input.sizes(), input.scalar_type());
    if (static_cast<int64_t>(input.nbytes()) <= kDirectBytes) {
      const std::vector<int64_t> whole(size(), input.numel());
      return reduce_pieces(call, input, whole, result, part_of(result, 0, input.numel()), false);
    }
    std::vector<int64_t> counts(size());
    for (int i = 0; i < size(); ++i) counts[i] = input.numel() * (i + 1) / size() - input.numel() * i / size();
    return reduce_pieces(call, input, counts, result, part_of(result, offset(counts, rank()), counts[rank()]), true);
  }

  Async do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override {
    return reduce_pieces(call, input, counts, result, part_of(result, 0, counts[rank()]), false);
  }

  // Every peer gets its piece of the input, or the whole input when all counts are its size; the pieces for this rank are
  // reduced into `target`, a part of `result`. With `share` all ranks' parts are then gathered.
  Async reduce_pieces(const Call& call, const at::Tensor& input, Counts counts, const at::Tensor& result, Bytes target, bool share) {
    const bool whole = call.kind == Collective::all_reduce && !share;
    const int64_t mine = counts[rank()];
    const auto piece = [&](int member) { return part_of(input, whole ? 0 : offset(counts, member), counts[member]); };
    at::Tensor incoming = empty({(size() - 1) * mine}, input.scalar_type());
    auto job = start(call, input, call.kind == Collective::reduce_scatter ? hash_counts(counts) : 0);
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

  Async do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override {
    auto job = start(call, input, hash_counts(counts));
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

  Async do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) override {
    at::Tensor result = empty({offset(recv, size())}, input.scalar_type());
    auto job = start(call, input, 0);
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

  Async do_broadcast(const Call& call, const at::Tensor& input) override {
    at::Tensor result = empty(input.sizes(), input.scalar_type());
    auto job = start(call, input, 0);
    const Bytes mine = part_of(input, 0, input.numel()), target = part_of(result, 0, input.numel());
    if (rank() == call.root) copy(target, mine);
    for (int member = 0; member < size(); ++member) {
      if (member == rank()) continue;
      job->first.add(ranks()[member], rank() == call.root ? mine : Bytes{}, member == call.root ? target : Bytes{});
    }
    job->keep = {input, result};
    return finish(std::move(job), result, collectives_, false);
  }

  Async do_send(const Call& call, const at::Tensor& input) override {
    const bool buffered = static_cast<int64_t>(input.nbytes()) <= kBufferedSendBytes;
    at::Tensor message = input;
    if (buffered) {
      message = empty(input.sizes(), input.scalar_type());
      copy(part_of(message, 0, message.numel()), part_of(input, 0, input.numel()));
    }
    auto job = start_message(call, input, rank(), call.root);
    job->first.add(ranks()[call.root], part_of(message, 0, message.numel()), {}, Exchange::Direction::send);
    job->keep = {message};
    return finish(std::move(job), at::Tensor(), messages_, false, buffered);
  }

  Async do_recv(const Call& call, const at::Tensor& like) override {
    at::Tensor result = empty(like.sizes(), like.scalar_type());
    auto job = start_message(call, like, call.root, rank());
    job->first.add(ranks()[call.root], {}, part_of(result, 0, result.numel()), Exchange::Direction::receive);
    job->keep = {result};
    return finish(std::move(job), result, messages_, false);
  }

  void do_barrier(const Call& call) override {
    auto job = start(call, at::Tensor(), 0);
    for (int member = 0; member < size(); ++member) {
      if (member != rank()) job->first.add(ranks()[member], {}, {});
    }
    finish(std::move(job), at::Tensor(), collectives_, false).work->wait();
  }

  static CallInfo describe(const Call& call, const at::Tensor& input, uint64_t counts_hash) {
    CallInfo info;
    info.kind = call.kind;
    info.op = call.op;
    info.root = call.root;
    info.tag = call.tag;
    info.sequence = call.sequence;
    info.counts_hash = counts_hash;
    Subject::describe(info);
    if (input.defined()) {
      require_cpu(call.kind, input, "gloo");
      info.dtype = static_cast<int8_t>(input.scalar_type());
      info.numel = input.numel();
    }
    return info;
  }

  std::shared_ptr<Job> start(const Call& call, const at::Tensor& input, uint64_t counts_hash) {
    link_->made(id_, call.sequence);
    return std::make_shared<Job>(link_, describe(call, input, counts_hash), id_, name(), transport_.rank(), transport_.deadline());
  }

  // Both ends use one stream, and each notes its own progress in it.
  std::shared_ptr<Job> start_message(const Call& call, const at::Tensor& tensor, int from, int to) {
    const uint64_t stream =
        mix(mix(mix(id_, 1 + static_cast<uint64_t>(from)), 1 + static_cast<uint64_t>(to)), static_cast<uint64_t>(call.tag));
    link_->made(stream, call.sequence);
    return std::make_shared<Job>(link_, describe(call, tensor, 0), stream, name(), transport_.rank(), transport_.deadline());
  }

  Async finish(std::shared_ptr<Job> job, const at::Tensor& result, const std::shared_ptr<Worker>& worker, bool in_background,
               bool forget = false) {
    job->post();
    if ((in_background || forget) && job->claim()) worker->add(job);
    if (forget) return {};
    return {result, c10::make_intrusive<JobWork>(std::move(job), worker)};
  }

  const uint64_t id_;
  std::shared_ptr<Link> link_;
  std::shared_ptr<Worker> collectives_, messages_;
  const Transport& transport_;
};

class GlooTransport final : public Transport, public Control {
 public:
  GlooTransport(const GlooOptions& options, std::shared_ptr<Listener> listener)
      : rank_(options.rank), size_(options.size), link_(std::make_shared<Link>(options, std::move(listener))),
        messages_(std::make_shared<Worker>()) {
    set_deadline(options.deadline);
  }

  ~GlooTransport() override {
    link_->shut_down(deadline());
    for (auto& worker : workers_) worker->stop();
    messages_->stop();
  }

  std::string_view name() const override { return "gloo"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::shared_ptr<Communicator> connect(const std::string& name, const std::vector<int>& ranks) override {
    const int position = position_in(name, ranks, rank_, size_);
    uint64_t id = mix(0, static_cast<uint64_t>(connected_[ranks]++));
    for (int rank : ranks) id = mix(id, static_cast<uint64_t>(rank));
    workers_.push_back(std::make_shared<Worker>());
    return std::make_shared<GlooCommunicator>(name, ranks, position, id, link_, workers_.back(), messages_, *this);
  }

  void leave(const std::string& why) override { link_->leave(why); }

  void made(uint64_t stream, uint64_t sequence) override { link_->made(stream, sequence); }
  std::optional<std::string> obstacle(int rank, uint64_t stream, uint64_t sequence) override { return link_->obstacle({rank, stream, sequence}); }
  std::optional<std::string> first_failure(Milliseconds patience) override { return link_->first_failure(patience); }

 private:
  const int rank_, size_;
  std::shared_ptr<Link> link_;
  std::vector<std::shared_ptr<Worker>> workers_;  // one per communicator
  std::shared_ptr<Worker> messages_;
  std::map<std::vector<int>, int> connected_;  // how often each list of ranks was connected
};

}  // namespace

}  // namespace gloo

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options) { return make_gloo_transport(options, nullptr); }

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options, std::shared_ptr<Listener> listener) {
  require(options.size > 0 && options.rank >= 0 && options.rank < options.size, "make_gloo_transport",
          "got rank {} of {}; expected 0 <= rank < size", options.rank, options.size);
  return std::make_unique<gloo::GlooTransport>(options, std::move(listener));
}

}  // namespace dtensor::comm
