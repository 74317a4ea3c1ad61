// The conformance bodies on every transport and at several world sizes.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/comm/fake_transport.hpp>

#include "src/comm/reduce.hpp"

#include <ATen/ATen.h>
#include <range/v3/numeric/iota.hpp>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <thread>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::ReduceOp;
using dtensor::World;

namespace {

void check_everything(const std::string& transport) {
  for (int ranks : {1, 2, 3, 4, 8}) {
    INFO(transport << ", " << ranks << " ranks");
    CHECK_NOTHROW(run_ranks(transport, ranks, check_reductions));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_data_movement));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_asynchrony));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_messages));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_messages_out_of_order));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_subgroups));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_chunks));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_many_in_flight));
    CHECK_NOTHROW(run_ranks(transport, ranks, check_groups_come_and_go));
  }
}

// The bytes of a series of collectives on random data, for comparison between transports.
std::vector<char> fingerprint(World& world) {
  auto all = connect_all(world);
  const int ranks = world.size(), me = world.rank();
  std::vector<char> bytes;
  const auto add = [&](const at::Tensor& tensor) {
    const auto* data = static_cast<const char*>(tensor.data_ptr());
    bytes.insert(bytes.end(), data, data + tensor.nbytes());
  };
  // Numbers whose sum depends on the order of additions.
  for (int64_t count : {11, 70'000}) {
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      const auto input = (at::arange(count, at::kDouble).mul(0.1 + me).sin() * std::pow(10.0, me % 4)).to(dtype);
      add(all->all_reduce(input, ReduceOp::sum).get());
      add(all->all_reduce(input, ReduceOp::avg).get());
      std::vector<int64_t> counts(ranks, 0);
      counts[ranks / 2] = count;
      add(all->reduce_scatter(input, counts, ReduceOp::sum).get());
    }
  }
  return bytes;
}

std::vector<std::vector<char>> fingerprints(const std::string& transport, int ranks) {
  std::vector<std::vector<char>> result(ranks);
  run_ranks(transport, ranks, [&](World& world) { result[world.rank()] = fingerprint(world); });
  return result;
}

}  // namespace

TEST_CASE("threads: all collectives at 1 to 8 ranks", "[comm]") { check_everything("threads"); }

TEST_CASE("gloo: all collectives at 1 to 8 ranks", "[comm][gloo]") { check_everything("gloo"); }

TEST_CASE("shm: all collectives at 1 to 8 ranks", "[comm][gloo]") { check_everything("shm"); }

TEST_CASE("shm: long pieces go through slots where ranks may not read each other's memory", "[comm][gloo]") {
  setenv("DTENSOR_DIRECT_READS", "0", 1);
  for (int ranks : {2, 3}) {
    CHECK_NOTHROW(run_ranks("shm", ranks, check_data_movement));
    CHECK_NOTHROW(run_ranks("shm", ranks, check_asynchrony));
    CHECK_NOTHROW(run_ranks("shm", ranks, check_chunks));
  }
  unsetenv("DTENSOR_DIRECT_READS");
}

TEST_CASE("all transports give the same bits", "[comm][gloo]") {
  for (int ranks : {2, 3, 8}) {
    const auto expected = fingerprints("threads", ranks);
    CHECK(fingerprints("shm", ranks) == expected);
    CHECK(fingerprints("gloo", ranks) == expected);
  }
}

TEST_CASE("many messages that nobody has received yet take no threads", "[comm][gloo]") {
  const auto threads = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}); };
  for (const std::string transport : {"shm", "gloo"}) {
    CHECK_NOTHROW(run_ranks(transport, 2, [&](World& world) {
      auto all = connect_all(world);
      constexpr int kMessages = 200;
      all->barrier();
      const auto before = threads();
      for (int i = 0; world.rank() == 0 && i < kMessages; ++i) all->send(at::full({3}, i, at::kFloat), 1);
      dtensor::require(threads() < before + 20, "test", "{} threads, {} before", threads(), before);
      all->barrier();
      for (int i = 0; world.rank() == 1 && i < kMessages; ++i) {
        dtensor::require(all->recv(at::zeros({3}), 0).get().eq(i).all().item<bool>(), "test", "message {}", i);
      }
    }));
  }
}

TEST_CASE("many small collectives under oversubscription", "[comm][gloo]") {
  for (const std::string transport : {"threads", "shm"}) {
    CHECK_NOTHROW(run_ranks(transport, 16, [](World& world) {
      auto all = connect_all(world);
      const auto one = at::ones({16});
      for (int i = 0; i < 500; ++i) {
        dtensor::require(all->all_reduce(one, ReduceOp::sum).get().data_ptr<float>()[15] == 16, "test", "sum at {}", i);
      }
    }));
  }
}

TEST_CASE("fake: as if every peer had this rank's data", "[comm]") {
  for (int ranks : {2, 3, 16384}) {
    auto transport = dtensor::comm::make_fake_transport(1, ranks);
    std::vector<int> everyone(ranks);
    ranges::iota(everyone, 0);
    auto all = transport->connect("all", everyone);
    const auto x = at::arange(4, at::kDouble) + 1;
    CHECK(at::equal(all->all_reduce(x, ReduceOp::sum).get(), x * ranks));
    CHECK(at::equal(all->all_reduce(x, ReduceOp::avg).get(), x));
    CHECK(at::equal(all->all_reduce(x, ReduceOp::max).get(), x));
    CHECK(at::equal(all->all_gather(x, std::vector<int64_t>(ranks, 4)).get(), x.repeat(at::IntArrayRef(int64_t{ranks}))));
    std::vector<int64_t> counts(ranks, 0);
    counts[0] = 1, counts[1] = 3;
    CHECK(at::equal(all->reduce_scatter(x, counts, ReduceOp::sum).get(), x.slice(0, 1, 4) * ranks));
    CHECK(at::equal(all->broadcast(x, 0).get(), x));
    CHECK(all->all_to_all(x, counts, std::vector<int64_t>(ranks, 3)).get().numel() == 3 * ranks);
    CHECK(all->recv(x, 0).get().numel() == 4);
    all->barrier();
  }
}

TEST_CASE("fake: messages between ranks that are there arrive", "[comm]") {
  auto transports = dtensor::comm::make_fake_transports({1, 5}, 8);
  std::vector<int> everyone{0, 1, 4, 5};
  auto one = transports[0]->connect("some", everyone), five = transports[1]->connect("some", everyone);
  CHECK(one->rank() == 1);
  CHECK(five->rank() == 3);
  std::thread late([&] {
    five->send(at::full({3}, 7.0), 1, 4);
    five->send(at::full({3}, 8.0), 1);
  });
  CHECK(at::equal(one->recv(at::zeros({3}), 3).get(), at::full({3}, 8.0)));
  CHECK(at::equal(one->recv(at::zeros({3}), 3, 4).get(), at::full({3}, 7.0)));
  late.join();
  one->send(at::empty({5}, at::kMeta), 3);
  CHECK(five->recv(at::empty({5}, at::kMeta), 1).get().is_meta());
  CHECK(five->recv(at::ones({2}), 2).get().eq(1).all().item<bool>());  // of a rank that is not there

  transports[1]->leave("it is over");
  CHECK_THROWS_AS(one->recv(at::zeros({3}), 3).get(), dtensor::Error);
}

TEST_CASE("the average of the integers of many ranks", "[comm]") {
  constexpr int64_t kCount = 1500;
  for (auto [dtype, value] : {std::pair{at::kByte, 255}, {at::kChar, -128}, {at::kShort, 32'767}}) {
    const auto same = at::full({kCount}, value, dtype);
    auto result = at::zeros({kCount}, dtype);
    for (int ranks : {255, 256, 65'536}) {
      dtensor::comm::reduce(dtype, ReduceOp::avg, result.data_ptr(), std::vector<const void*>(ranks, same.data_ptr()), kCount);
      CHECK(at::equal(result, same));
    }
  }
}

TEST_CASE("every collective leaves an event with its cause", "[comm]") {
  struct Recorder : dtensor::comm::Observer {
    using Observer::Observer;
    ~Recorder() override { stop_observing(); }
    std::vector<dtensor::comm::Event> records;
    std::vector<std::string> ops;
    void on_issue(const dtensor::comm::Event& event) override {
      records.push_back(event);
      ops.emplace_back(std::string_view(event.op));
    }
  };
  auto transport = dtensor::comm::make_fake_transport(0, 2);
  auto pair = transport->connect("tp", {0, 1});
  const dtensor::comm::Events events;
  pair->record_in(events);
  const auto x = at::ones({6});
  Recorder outer(events);
  {
    Recorder inner(events);
    dtensor::comm::Cause cause("aten::mm", true, "layers.3");
    pair->all_reduce(x, ReduceOp::sum);
    CHECK(inner.records.size() == 1);
  }
  pair->barrier();
  pair->send(x, 1);
  REQUIRE(outer.records.size() == 3);
  CHECK(outer.records[0].kind == dtensor::comm::Collective::all_reduce);
  CHECK(outer.records[0].bytes == 24);
  CHECK(std::string_view(outer.records[0].group) == "tp");
  CHECK(std::string_view(outer.records[0].module) == "layers.3");
  CHECK(outer.records[1].module.empty());
  CHECK(outer.records[0].group_size == 2);
  CHECK(outer.records[0].implicit);
  const std::vector<std::string> causes{"aten::mm", "", ""};
  CHECK(outer.ops == causes);
  CHECK(outer.records[1].sequence == 2);
  CHECK_FALSE(outer.records[1].implicit);
  transport->connect("one", {0})->all_reduce(x, ReduceOp::sum);
  CHECK(outer.records.size() == 3);
  const auto kept = events.get(1);
  CHECK(kept.issued > 0);
  CHECK(kept.started >= kept.issued);
  CHECK(kept.done >= kept.started);
  CHECK_FALSE(kept.failed);
}

TEST_CASE("events are kept as long as there is room and end where their ranks do", "[comm]") {
  dtensor::comm::Events events;
  auto pair = dtensor::comm::make_fake_transport(0, 2)->connect("dp", {0, 1});
  pair->record_in(events);
  const auto kept = dtensor::comm::Events::kKept;
  for (uint64_t i = 0; i < kept + 10; ++i) pair->barrier();
  CHECK(events.count() == kept + 10);
  CHECK(events.get(10).number == 0);
  CHECK(events.get(11).sequence == 11);
  CHECK(events.get(kept + 10).sequence == kept + 10);
  dtensor::comm::Event under_way;
  const auto ref = events.issue(under_way);
  CHECK(events.get(kept + 11).done == 0);
  ref.failed();
  CHECK(events.get(kept + 11).failed);
  ref.done();
  const auto first = events.get(kept + 11).done;
  CHECK(first > 0);
  ref.done();
  CHECK(events.get(kept + 11).done == first);
}

TEST_CASE("the events of two threads of one rank are seen by one observer", "[comm]") {
  struct Counter : dtensor::comm::Observer {
    using Observer::Observer;
    ~Counter() override { stop_observing(); }
    int calls = 0;
    void on_issue(const dtensor::comm::Event&) override { ++calls; }
  };
  const dtensor::comm::Events events;
  Counter counter(events);
  auto transport = dtensor::comm::make_fake_transport(0, 2);
  auto mine = transport->connect("a", {0, 1}), theirs = transport->connect("b", {0, 1});
  mine->record_in(events);
  theirs->record_in(events);
  std::thread other([&] {
    for (int i = 0; i < 500; ++i) theirs->barrier();
  });
  for (int i = 0; i < 500; ++i) mine->barrier();
  other.join();
  CHECK(counter.calls == 1000);
  CHECK(events.get(1).thread != 0);
}

TEST_CASE("arguments of collectives are checked", "[comm]") {
  auto transport = dtensor::comm::make_fake_transport(0, 2);
  auto pair = transport->connect("tp", {0, 1});
  const auto x = at::ones({4, 2});
  CHECK(fails_with([&] { pair->all_reduce(x.t(), ReduceOp::sum); }, "not contiguous"));
  CHECK(fails_with([&] { pair->all_reduce(at::Tensor(), ReduceOp::sum); }, "undefined"));
  CHECK(fails_with([&] { pair->all_reduce(x, ReduceOp::norm2); }, "norm2"));
  CHECK(fails_with([&] { pair->all_reduce(x.to(at::kBool), ReduceOp::avg); }, "avg"));
  CHECK(fails_with([&] { pair->all_gather(x, {7, 8}); }, "expected 8"));
  CHECK(fails_with([&] { pair->reduce_scatter(x, {4, 3}, ReduceOp::sum); }, "8 elements"));
  CHECK(fails_with([&] { pair->reduce_scatter(x, {8}, ReduceOp::sum); }, "one per rank"));
  CHECK(fails_with([&] { pair->reduce_scatter(x, {-1, 9}, ReduceOp::sum); }, "negative"));
  CHECK(fails_with([&] { pair->all_to_all(x, {4, 4}, {5, 3}); }, "itself"));
  CHECK(fails_with([&] { pair->broadcast(x, 2); }, "root"));
  CHECK(fails_with([&] { pair->send(x, 0); }, "peer"));
  CHECK(fails_with([&] { transport->connect("x", {0, 0}); }, "twice"));
  CHECK(fails_with([&] { transport->connect("x", {1}); }, "not in group"));
  CHECK(fails_with([&] { transport->connect("x", {0, 2}); }, "outside the world"));
}
