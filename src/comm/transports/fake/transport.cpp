// The fake transport: one rank of a world of any size, or a few of them, without the others. Results of collectives are what they would be
// if every peer had this rank's data, which gives dry runs the right shapes, memory and records. Messages between ranks that are there
// arrive.
#include <dtensor/base/error.hpp>
#include <dtensor/comm/fake_transport.hpp>
#include <dtensor/comm/transport_kind.hpp>

#include "src/comm/describe.hpp"
#include "src/comm/reduce.hpp"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

namespace dtensor::comm {

namespace {

// `target` elements from `source` elements, repeated or cut as needed; zeros when there are none.
void repeat(char* target, int64_t target_bytes, const char* source, int64_t source_bytes) {
  if (source_bytes == 0) {
    std::fill_n(target, target_bytes, 0);
    return;
  }
  for (int64_t done = 0; done < target_bytes; done += source_bytes) {
    std::memcpy(target + done, source, std::min(source_bytes, target_bytes - done));
  }
}

// The product of `times` equal inputs, by repeated squaring.
void multiply_equal(c10::ScalarType dtype, void* out, const void* in, int64_t count, int64_t bytes, int times) {
  std::vector<char> power(static_cast<const char*>(in), static_cast<const char*>(in) + bytes);
  for (int rest = times - 1; rest > 0; rest /= 2) {
    if (rest % 2 == 1) reduce(dtype, ReduceOp::product, out, {out, power.data()}, count);
    reduce(dtype, ReduceOp::product, power.data(), {power.data(), power.data()}, count);
  }
}

// The reduction of `times` equal inputs, in a time that does not grow with their number.
void reduce_equal(c10::ScalarType dtype, ReduceOp op, void* out, const void* in, int64_t count, int64_t bytes, int times) {
  if (count == 0) return;
  if (out != in) std::memcpy(out, in, bytes);  // avg, min and max of equal values
  if (op == ReduceOp::product) return multiply_equal(dtype, out, in, count, bytes, times);
  if (op != ReduceOp::sum || dtype == c10::ScalarType::Bool) return;
  AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND2(at::kHalf, at::kBFloat16, dtype, "reduce", [&] {
    using Wide = at::opmath_type<scalar_t>;
    auto* values = static_cast<scalar_t*>(out);
    const auto scale = [&](scalar_t& value) { value = static_cast<scalar_t>(static_cast<Wide>(value) * static_cast<Wide>(times)); };
    constexpr int64_t kBlock = 16;  // a constant, so that the loop is vectorized
    int64_t i = 0;
    for (; i + kBlock <= count; i += kBlock) {
      for (int64_t j = 0; j < kBlock; ++j) scale(values[i + j]);
    }
    for (; i < count; ++i) scale(values[i]);
  });
}

// Messages between the ranks that are there.
class PostOffice {
 public:
  explicit PostOffice(std::vector<int> ranks) : ranks_(std::move(ranks)) {}
  bool has(int rank) const { return std::ranges::find(ranks_, rank) != ranks_.end(); }

  // Of a group (its name and number), between two of its ranks, with a tag and a number.
  using Address = std::tuple<std::string, int, int, int, int, uint64_t>;

  void post(const Address& address, at::Tensor message) {
    const std::lock_guard lock(mutex_);
    messages_[address] = std::move(message);
    came_.notify_all();
  }

  bool has(const Address& address) {
    const std::lock_guard lock(mutex_);
    return messages_.count(address) > 0 || !why_left_.empty();
  }

  at::Tensor take(const Address& address, Milliseconds deadline) {
    std::unique_lock lock(mutex_);
    const bool in_time = came_.wait_for(lock, deadline, [&] { return messages_.count(address) > 0 || !why_left_.empty(); });
    const auto found = messages_.find(address);
    require(found != messages_.end(), "recv", "no message came from rank {}: {}", std::get<2>(address),
            in_time ? why_left_ : fmt::format("it took longer than {} ms", deadline.count()));
    auto message = std::move(found->second);
    messages_.erase(found);
    return message;
  }

  void leave(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (why_left_.empty()) why_left_ = why;
    came_.notify_all();
  }

 private:
  const std::vector<int> ranks_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<Address, at::Tensor> messages_;  // undefined: without values
  std::string why_left_;
};

// A message that is to come into `result`.
class Receiving final : public Work {
 public:
  Receiving(std::shared_ptr<PostOffice> office, PostOffice::Address address, Milliseconds deadline, at::Tensor result)
      : office_(std::move(office)), address_(std::move(address)), deadline_(deadline), result_(std::move(result)) {}
  void wait() override {
    if (came_) return;
    const auto message = office_->take(address_, deadline_);
    if (message.defined()) result_.copy_(message);
    came_ = true;
  }
  bool done() override { return came_ || office_->has(address_); }

 private:
  const std::shared_ptr<PostOffice> office_;
  const PostOffice::Address address_;
  const Milliseconds deadline_;
  const at::Tensor result_;
  bool came_ = false;
};

class FakeCommunicator final : public Communicator {
 public:
  FakeCommunicator(const std::string& name, const std::vector<int>& ranks, int position, int nth, std::shared_ptr<PostOffice> office,
                   Milliseconds deadline)
      : Communicator(name, ranks, position), nth_(nth), office_(std::move(office)), deadline_(deadline) {}

 private:
  Async do_all_reduce(const Call& call, const at::Tensor& input, at::Tensor result) override {
    return reduced(call, input, 0, input.numel(), std::move(result));
  }

  Async do_reduce_scatter(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override {
    return reduced(call, input, offset(counts, rank()), counts[rank()], std::move(result));
  }

  Async do_all_gather(const Call& call, const at::Tensor& input, Counts counts, at::Tensor result) override {
    if (!has_data(call, input)) return {result, {}};
    const auto element = static_cast<int64_t>(input.element_size());
    char* out = static_cast<char*>(result.data_ptr());
    for (int64_t count : counts) {
      repeat(out, count * element, static_cast<const char*>(input.data_ptr()), static_cast<int64_t>(input.nbytes()));
      out += count * element;
    }
    return {result, {}};
  }

  Async do_all_to_all(const Call& call, const at::Tensor& input, Counts send, Counts recv) override {
    at::Tensor result = empty_for(input, {offset(recv, size())});
    if (!has_data(call, input)) return {result, {}};
    const auto element = static_cast<int64_t>(input.element_size());
    const char* mine = static_cast<const char*>(input.data_ptr()) + offset(send, rank()) * element;
    char* out = static_cast<char*>(result.data_ptr());
    for (int64_t count : recv) {
      repeat(out, count * element, mine, send[rank()] * element);
      out += count * element;
    }
    return {result, {}};
  }

  Async do_broadcast(const Call& call, const at::Tensor& input) override { return {copy(call, input), {}}; }
  Async do_send(const Call& call, const at::Tensor& input) override {
    const int peer = ranks()[call.root];
    if (office_->has(peer)) office_->post(address(call, ranks()[rank()], peer), input.is_meta() ? at::Tensor() : input.clone());
    return {};
  }
  Async do_recv(const Call& call, const at::Tensor& like) override {
    const int peer = ranks()[call.root];
    if (!office_->has(peer)) return {copy(call, like), {}};
    const auto result = empty_for(like, like.sizes());
    return {result, c10::make_intrusive<Receiving>(office_, address(call, peer, ranks()[rank()]), deadline_, result)};
  }
  void do_barrier(const Call&) override {}

  Async reduced(const Call& call, const at::Tensor& input, int64_t begin, int64_t count, at::Tensor result) const {
    if (!has_data(call, input)) return {result, {}};
    const auto element = static_cast<int64_t>(input.element_size());
    const char* in = static_cast<const char*>(input.data_ptr()) + begin * element;
    reduce_equal(input.scalar_type(), call.op, result.data_ptr(), in, count, count * element, size());
    return {result, {}};
  }

  static at::Tensor copy(const Call& call, const at::Tensor& input) {
    at::Tensor result = empty_for(input, input.sizes());
    if (has_data(call, input) && input.numel() > 0) std::memcpy(result.data_ptr(), input.data_ptr(), input.nbytes());
    return result;
  }

  static bool has_data(const Call& call, const at::Tensor& input) {
    if (!input.is_meta()) require_cpu(call.kind, input, "fake");
    return !input.is_meta();
  }

  static int64_t offset(Counts counts, int position) {
    int64_t sum = 0;
    for (int i = 0; i < position; ++i) sum += counts[i];
    return sum;
  }

  PostOffice::Address address(const Call& call, int from, int to) const { return {name(), nth_, from, to, call.tag, call.sequence}; }

  const int nth_;
  const std::shared_ptr<PostOffice> office_;
  const Milliseconds deadline_;
};

class FakeTransport final : public Transport {
 public:
  FakeTransport(int rank, int size, std::shared_ptr<PostOffice> office) : rank_(rank), size_(size), office_(std::move(office)) {}
  std::string_view name() const override { return "fake"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::shared_ptr<Communicator> do_connect(const std::string& name, const std::vector<int>& ranks, int nth) override {
    return std::make_shared<FakeCommunicator>(name, ranks, position_in(name, ranks, rank_, size_), nth, office_, deadline());
  }
  void leave(const std::string& why) override { office_->leave(why); }

 private:
  const int rank_, size_;
  const std::shared_ptr<PostOffice> office_;
};

}  // namespace

std::unique_ptr<Transport> make_fake_transport(int rank, int size) { return std::move(make_fake_transports({rank}, size)[0]); }

std::vector<std::unique_ptr<Transport>> make_fake_transports(const std::vector<int>& ranks, int size) {
  const auto office = std::make_shared<PostOffice>(ranks);
  std::vector<std::unique_ptr<Transport>> transports;
  for (const int rank : ranks) {
    require(size > 0 && rank >= 0 && rank < size, "make_fake_transport", "got rank {} of {}; expected 0 <= rank < size", rank, size);
    transports.push_back(std::make_unique<FakeTransport>(rank, size, office));
  }
  return transports;
}

namespace {

const RegisterTransport fake({.name = "fake",
                              .threads =
                                  [](const ThreadsJob& job) { return [size = job.ranks](int) { return make_fake_transport(0, size); }; },
                              .one_for_all = true});

}  // namespace

}  // namespace dtensor::comm
