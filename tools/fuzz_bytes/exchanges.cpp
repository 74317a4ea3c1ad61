// What ranks send each other as tensors and read as something else: shapes, batches, traces.
#include "tools/fuzz_bytes/target.hpp"

#include "src/comm/describe.hpp"
#include "src/data/parcel.hpp"
#include "src/observe/spans.hpp"

#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/ones.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

namespace dtensor::fuzz_bytes {

namespace {

// A group of two ranks, of which this is one, and the other has sent these bytes: one message after the other, zeroes at the end.
class Peer final : public comm::Communicator {
 public:
  Peer(std::string name, std::vector<int> ranks, int rank, std::string* bytes)
      : Communicator(std::move(name), std::move(ranks), rank), bytes_(*bytes) {}

 private:
  at::Tensor take(at::Tensor to, int64_t from_byte = 0) {
    const auto size = static_cast<size_t>(static_cast<int64_t>(to.nbytes()) - from_byte);
    auto* begin = static_cast<char*>(to.data_ptr()) + from_byte;
    std::memset(begin, 0, size);
    bytes_.erase(0, bytes_.copy(begin, size));
    return to;
  }
  at::Tensor like(const at::Tensor& tensor) { return at::ones(tensor.sizes(), tensor.scalar_type()); }

  comm::Async do_all_reduce(const Call&, const at::Tensor&, at::Tensor result) override { return {take(result), {}}; }
  comm::Async do_all_gather(const Call&, const at::Tensor& input, comm::Counts, at::Tensor result) override {
    std::memcpy(result.data_ptr(), input.data_ptr(), input.nbytes());
    return {take(result, static_cast<int64_t>(input.nbytes())), {}};
  }
  comm::Async do_reduce_scatter(const Call&, const at::Tensor&, comm::Counts, at::Tensor result) override { return {take(result), {}}; }
  comm::Async do_all_to_all(const Call&, const at::Tensor& input, comm::Counts, comm::Counts) override { return {take(like(input)), {}}; }
  comm::Async do_broadcast(const Call&, const at::Tensor& input) override { return {take(like(input)), {}}; }
  comm::Async do_send(const Call&, const at::Tensor&) override { return {}; }
  comm::Async do_recv(const Call&, const at::Tensor& given) override { return {take(like(given)), {}}; }
  void do_barrier(const Call&) override {}

  std::string& bytes_;
};

class PeerTransport final : public comm::Transport {
 public:
  explicit PeerTransport(std::string* bytes) : bytes_(bytes) {}
  std::string_view name() const override { return "bytes"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void leave(const std::string&) override {}
  std::shared_ptr<comm::Communicator> do_connect(const std::string& name, const std::vector<int>& ranks, int) override {
    return std::make_shared<Peer>(name, ranks, comm::position_in(name, ranks, 0, 2), bytes_);
  }

 private:
  std::string* bytes_;
};

void read_shapes(const std::string& given) {
  static std::string bytes;
  static World world(std::make_unique<PeerTransport>(&bytes));
  World::Use use(world);
  bytes = given;
  const auto mesh = init_device_mesh(c10::kCPU, {2}, {"two"});
  bytes = given;
  from_local(at::ones({2, 3}), mesh, {shard(0)});
}

std::vector<std::string> shapes() {
  const auto words = [](std::vector<int64_t> all) {
    all.resize(18);
    return std::string(reinterpret_cast<const char*>(all.data()), 8 * all.size());
  };
  return {words({6, 2, 2, 3}), words({6, 2, 2, 3})};
}

// Of all kinds of parts.
struct Batch {
  at::Tensor images;
  std::vector<std::string> names;
  std::vector<at::Tensor> masks;
  std::optional<int32_t> side;

  void visit(data::PartVisitor& visitor) { visitor(images, names, masks, side); }
};

std::string sent(Batch batch) {
  data::Parcel parcel;
  parcel.kind = data::Parcel::Kind::batch;
  batch.visit(parcel);
  parcel.generator = at::ones({16}, at::kByte);
  struct Keep final : comm::Communicator {
    Keep() : Communicator("keep", {0, 1}, 0) {}
    std::string bytes;
    comm::Async do_broadcast(const Call&, const at::Tensor& input) override {
      bytes.append(static_cast<const char*>(input.data_ptr()), input.nbytes());
      return {input, {}};
    }
    comm::Async do_all_reduce(const Call&, const at::Tensor&, at::Tensor) override { return {}; }
    comm::Async do_all_gather(const Call&, const at::Tensor&, comm::Counts, at::Tensor) override { return {}; }
    comm::Async do_reduce_scatter(const Call&, const at::Tensor&, comm::Counts, at::Tensor) override { return {}; }
    comm::Async do_all_to_all(const Call&, const at::Tensor&, comm::Counts, comm::Counts) override { return {}; }
    comm::Async do_send(const Call&, const at::Tensor&) override { return {}; }
    comm::Async do_recv(const Call&, const at::Tensor&) override { return {}; }
    void do_barrier(const Call&) override {}
  } keep;
  parcel.send(keep);
  return keep.bytes;
}

std::vector<std::string> parcels() {
  return {sent({at::ones({2, 3}), {"a", "bcd"}, {at::ones({4}, at::kBool), {}}, 3}), sent({at::ones({0, 5}), {}, {}, {}})};
}

// A batch may be large: what is announced in good form is allocated, and is left out here.
bool is_large(const std::string& bytes) {
  const auto header = object_of<std::array<int64_t, 4>>(bytes);
  return std::ranges::any_of(header, [](int64_t size) { return size > int64_t{1} << 26; }) &&
         std::ranges::all_of(header, [](int64_t size) { return size <= int64_t{1} << 48; });
}

void receive_parcel(const std::string& given) {
  if (is_large(given)) return;
  auto bytes = given;
  Peer peer("world", {0, 1}, 1, &bytes);
  auto parcel = data::Parcel::receive(peer);
  if (parcel.kind == data::Parcel::Kind::error) parcel.error();
  if (parcel.kind != data::Parcel::Kind::batch) return;
  Batch batch;
  batch.visit(parcel);
  if (batch.images.defined()) batch.images.clone();
  for (const auto& mask : batch.masks) {
    if (mask.defined()) mask.clone();
  }
}

std::vector<std::string> traces() {
  trace::Spans spans;
  comm::Event event;
  event.issued = 100, event.started = 120, event.done = 200;
  event.op = "aten::mm", event.module = "layers.3", event.group = "dp";
  spans.add(event);
  event.what = comm::Event::What::scope;
  spans.add(event);
  spans.left_out = 2;
  return {spans.pack(), trace::Spans().pack()};
}

void read_trace(const std::string& bytes) {
  auto spans = trace::Spans::unpack(bytes);
  spans.shift(-5);
  spans.earliest();
  trace::json_of(std::move(spans), 1, 50);
}

}  // namespace

std::vector<Target> exchange_targets() {
  return {{"shapes", "from_local: the shapes of the other ranks' shards", shapes, read_shapes},
          {"parcels", "a batch from the rank that loads", parcels, receive_parcel},
          {"traces", "the events of another rank, for a trace", traces, read_trace}};
}

}  // namespace dtensor::fuzz_bytes
