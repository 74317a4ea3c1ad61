// Memory that ranks share: what is put is there after the wait, and what goes wrong is an error on every rank.
#include <dtensor/comm/symmetric_memory.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/fake_transport.hpp>

#include "tests/comm/comm_bodies.hpp"

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <optional>
#include <thread>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using dtensor::SymmetricMemory;
using dtensor::World;
using dtensor::comm::Milliseconds;
using dtensor_tests::connect_all;
using dtensor_tests::fails_with;
using dtensor_tests::run_ranks;

namespace {

// Over both transports, at each number of ranks.
void where_memory_is_shared(const std::function<void(World&)>& body, const std::vector<int>& ranks = {1, 2, 3, 4, 8}) {
  for (const std::string transport : {"threads", "shm"}) {
    for (const int count : ranks) {
      INFO(transport << ", " << count << " ranks");
      CHECK_NOTHROW(run_ranks(transport, count, body, 60'000));
    }
  }
}

void expect_all(const at::Tensor& x, double value, const char* what) {
  dtensor::require(x.eq(value).all().item<bool>(), "test", "{}: expected {}; got {} ... {}", what, value, x.view({-1})[0].item<double>(),
                   x.view({-1})[-1].item<double>());
}

struct Ends {
  std::vector<std::string> of_rank;
  std::string of_launch;
  double seconds = 0;
};

// What each rank threw, and launch itself.
Ends ends_of(const std::string& transport, int ranks, const std::function<void(World&, SymmetricMemory&)>& body,
             int deadline_ms = 60'000) {
  Ends ends;
  ends.of_rank.resize(ranks);
  const auto start = std::chrono::steady_clock::now();
  const auto text = [](const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    return std::string(ours ? ours->what_without_backtrace() : error.what());
  };
  try {
    run_ranks(transport, ranks, [&](World& world) {
      auto all = connect_all(world, "ep");
      try {
        SymmetricMemory memory(*all, 64, 2);
        body(world, memory);
      } catch (const std::exception& error) {
        ends.of_rank[world.rank()] = text(error);
        throw;
      }
    }, deadline_ms);
  } catch (const std::exception& error) {
    ends.of_launch = text(error);
  }
  ends.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return ends;
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("symmetric memory: what ranks put and get", "[comm][symmetric]") {
  where_memory_is_shared([](World& world) {
    auto all = connect_all(world);
    const int n = world.size(), me = world.rank();
    SymmetricMemory memory(*all, 64 * n);
    dtensor::require(memory.rank() == me && memory.size() == n && memory.bytes() == 64 * n && memory.pads() == 1, "test", "sizes");
    expect_all(memory.local(), 0, "new memory");
    all->barrier();
    for (int to = 0; to < n; ++to) {
      memory.put(at::full({2, 3}, 100 * me + to, at::kDouble), to, 64 * me);
      memory.put(at::full({3}, me, at::kShort), to, 64 * me + 57);  // anywhere
      memory.put(at::empty({0}), to, 64 * n);                      // nothing, at the end
      memory.signal(to);
    }
    for (int from = 0; from < n; ++from) {
      memory.wait(from, 1);
      dtensor::require(memory.signals(from) == 1, "test", "signals");
      expect_all(memory.view(me, {6}, at::kDouble, 64 * from), 100 * from + me, "what came");
      expect_all(memory.get(at::empty({3}, at::kShort), me, 64 * from + 57), from, "what came beside it");
    }
    all->barrier();
    for (int of = 0; of < n; ++of) {
      expect_all(memory.get(at::empty({3, 2}, at::kDouble), of, 64 * me), 100 * me + of, "what is there");
      expect_all(memory.view(of, {2, 3}, at::kDouble, 64 * me), 100 * me + of, "what is seen there");
    }
    all->barrier();
    const auto three = at::arange(6, at::kDouble).view({3, 2});
    memory.put_rows(three, at::tensor({2, 0, 2}, at::kLong), me, 0);
    dtensor::require(memory.view(me, {3, 2}, at::kDouble).equal(three.index_select(0, at::tensor({2, 0, 2}, at::kLong))), "test", "rows");
    all->barrier();
    memory.view((me + 1) % n, {8}, at::kFloat, 0).fill_(me);  // written in place
    memory.signal((me + 1) % n);
    memory.wait((me + n - 1) % n, 2);
    expect_all(memory.local().slice(0, 0, 32).view(at::kFloat), (me + n - 1) % n, "what was written");
  });
}

TEST_CASE("symmetric memory: a wait that returns sees what was put before", "[comm][symmetric]") {
  const auto rounds_of = [](int64_t rounds, int64_t numbers) {
    return [=](World& world) {
      auto all = connect_all(world);
      const int n = world.size(), next = (world.rank() + 1) % n, last = (world.rank() + n - 1) % n;
      SymmetricMemory memory(*all, 8 * numbers, 2);
      const auto out = at::empty({numbers}, at::kLong), in = memory.view(world.rank(), {numbers}, at::kLong);
      for (int64_t i = 1; i <= rounds; ++i) {
        memory.wait(next, i - 1, 1);  // the next rank has read the last round
        memory.put(out.fill_(i * n + world.rank()), next);
        memory.signal(next);
        memory.wait(last, i);
        const auto* number = in.data_ptr<int64_t>();
        for (int64_t k = 0; k < numbers; ++k) {
          dtensor::require(number[k] == i * n + last, "test", "round {}: number {} is {}", i, k, number[k]);
        }
        memory.signal(last, 1);
      }
    };
  };
  where_memory_is_shared(rounds_of(4000, 64), {1, 2});
  where_memory_is_shared(rounds_of(1000, 500), {3, 4});
  where_memory_is_shared(rounds_of(200, 500), {8});
}

TEST_CASE("symmetric memory: a rank sleeps until another thread of the other rank signals", "[comm][symmetric]") {
  where_memory_is_shared([](World& world) {
    auto all = connect_all(world);
    SymmetricMemory memory(*all, 8);
    for (int i = 1; i <= 3; ++i) {
      if (world.rank() == 0) {
        std::thread([&] {
          std::this_thread::sleep_for(Milliseconds(30));
          memory.put(at::full({1}, i, at::kDouble), 1);
          memory.signal(1);
        }).join();
        memory.wait(1, i);
      } else {
        memory.wait(0, i);
        expect_all(memory.view(1, {1}, at::kDouble), i, "after the sleep");
        memory.signal(0);
      }
    }
  }, {2});
}

TEST_CASE("symmetric memory: several at once and groups of their own", "[comm][symmetric]") {
  where_memory_is_shared([](World& world) {
    auto all = connect_all(world);
    const int n = world.size(), me = world.rank();
    auto pair = world.transport().connect("pair", me / 2 * 2 + 1 < n ? std::vector<int>{me / 2 * 2, me / 2 * 2 + 1} : std::vector<int>{me});
    for (int round = 0; round < 3; ++round) {
      std::vector<std::unique_ptr<SymmetricMemory>> memories;
      for (int i = 0; i < 4; ++i) memories.push_back(std::make_unique<SymmetricMemory>(*all, 8 * (i + 1), i + 1));
      auto with_peer = std::make_unique<SymmetricMemory>(*pair, 1 << 20);
      SymmetricMemory signals_only(*all, 0);
      for (const auto& memory : memories) expect_all(memory->local(), 0, "memory that was used before");
      all->barrier();
      for (int i = 0; i < 4; ++i) {
        memories[i]->put(at::full({i + 1}, 10 * me + i + round, at::kDouble), (me + 1) % n);
        memories[i]->signal((me + 1) % n, i);
      }
      with_peer->put(at::full({1 << 18}, me, at::kFloat), with_peer->size() - 1 - with_peer->rank());
      with_peer->signal(with_peer->size() - 1 - with_peer->rank());
      const auto last = (me + n - 1) % n;
      for (int i = 3; i >= 0; --i) {
        memories[i]->wait(last, 1, i);
        expect_all(memories[i]->local().view(at::kDouble), 10 * last + i + round, "of several");
        const auto kept = memories[i]->local().view(at::kDouble);
        memories[i].reset();
        expect_all(kept, 10 * last + i + round, "a view that outlives its memory");
      }
      with_peer->wait(with_peer->size() - 1 - with_peer->rank(), 1);
      expect_all(with_peer->local().view(at::kFloat), with_peer->size() == 1 ? me : me ^ 1, "of a pair");
      signals_only.signal(last);
      signals_only.wait((me + 1) % n, 1);
    }
  });
}

TEST_CASE("symmetric memory: a wait ends when a rank fails or leaves or lets go", "[comm][symmetric]") {
  for (const std::string transport : {"threads", "shm"}) {
    INFO(transport);
    const auto failed = ends_of(transport, 4, [](World& world, SymmetricMemory& memory) {
      if (world.rank() != 2) memory.wait(world.rank() == 3 ? 0 : 2, 1, 1);  // rank 3 waits for one that waits
      std::this_thread::sleep_for(Milliseconds(50));
      throw std::runtime_error("out of cheese");
    });
    CHECK(failed.of_launch == "out of cheese");
    for (const int rank : {0, 1, 3}) expect_parts(failed.of_rank[rank], {"rank 2 failed: out of cheese", "signal #1", "pad 1", "'ep'"});
    CHECK(failed.seconds < 20);

    const auto left = ends_of(transport, 2, [](World& world, SymmetricMemory& memory) {
      if (world.rank() == 1) return memory.signal(0);
      memory.wait(1, 1);  // which was before it left
      memory.wait(1, 2);
    });
    CHECK(left.of_rank[1].empty());
    expect_parts(left.of_rank[0], {"signal #2 of rank 1", "got 1 so far"});
    CHECK(left.seconds < 20);

    const auto gone = ends_of(transport, 2, [](World& world, SymmetricMemory&) {
      auto all = connect_all(world, "tp");
      std::optional<SymmetricMemory> memory(std::in_place, *all, 16);
      all->barrier();
      if (world.rank() == 1) {
        memory->put(at::full({2}, 7.0, at::kDouble), 0);
        memory->signal(0);
        memory.reset();
        all->recv(at::ones({1}), 0).get();
        return;
      }
      memory->wait(1, 1);
      expect_all(memory->local().view(at::kDouble), 7, "what was put before");
      dtensor::require(fails_with([&] { memory->wait(1, 2); }, "rank 1 has destroyed its part of the memory"), "test", "gone");
      memory->put(at::ones({1}), 1), memory->signal(1);  // nobody minds
      all->send(at::ones({1}), 1);
    });
    CHECK(gone.of_launch == "");
    CHECK(gone.seconds < 20);
  }
}

TEST_CASE("symmetric memory: a wait ends at the deadline and the memory stays as it was", "[comm][symmetric]") {
  for (const std::string transport : {"threads", "shm"}) {
    INFO(transport);
    std::atomic<bool> late{false};
    const auto ends = ends_of(transport, 2, [&](World& world, SymmetricMemory& memory) {
      if (world.rank() == 0) {
        dtensor::require(fails_with([&] { memory.wait(1, 1); }, "signal #1 of rank 1 on pad 0 in group 'ep' did not come within 0.5 s"),
                         "test", "the deadline");
        late = true;
        memory.wait(1, 1);
        expect_all(memory.local().slice(0, 0, 8).view(at::kDouble), 3, "what came late");
        memory.signal(1);
        return;
      }
      while (!late) std::this_thread::sleep_for(Milliseconds(5));
      memory.put(at::full({1}, 3.0, at::kDouble), 0);
      memory.signal(0);
      memory.wait(0, 1);
    }, 500);
    CHECK(ends.of_launch == "");
    CHECK(ends.seconds > 0.4);
    CHECK(ends.seconds < 20);
  }
}

TEST_CASE("symmetric memory: what it refuses", "[comm][symmetric]") {
  where_memory_is_shared([](World& world) {
    auto all = connect_all(world);
    const int n = world.size(), me = world.rank();
    const auto refused = [](const std::string& text, const std::function<void()>& call) {
      dtensor::require(fails_with(call, text), "test", "no error with '{}'", text);
    };
    // On all ranks, which go on.
    if (n > 1) refused("asks for 16 bytes and 1 pads, rank", [&] { SymmetricMemory(*all, me == n - 1 ? 24 : 16); });
    if (n > 1) refused("for 16 and 3", [&] { SymmetricMemory(*all, 16, me == 1 ? 3 : 1); });
    refused("got -1 bytes", [&] { SymmetricMemory(*all, -1); });
    refused("and 0 pads", [&] { SymmetricMemory(*all, 8, 0); });
    refused("expected 0 to 70368744177664 bytes", [&] { SymmetricMemory(*all, std::numeric_limits<int64_t>::max()); });
    refused("there is no room", [&] { SymmetricMemory(*all, int64_t{1} << 45); });

    SymmetricMemory memory(*all, 64, 2);
    const auto x = at::ones({4}, at::kDouble);
    refused("got 32 bytes at offset 33", [&] { memory.put(x, 0, 33); });
    refused("at offset -8", [&] { memory.put(x, 0, -8); });
    refused("got 72 bytes", [&] { memory.put(at::ones({9}, at::kDouble), 0); });
    refused("expected to end at 64", [&] { memory.get(x, 0, std::numeric_limits<int64_t>::max()); });
    refused("multiple of 8", [&] { memory.view(0, {1}, at::kDouble, 4); });
    refused("got 72 bytes", [&] { memory.view(0, {3, 3}, at::kDouble); });
    refused("expected 0 or more", [&] { memory.view(0, {-1}, at::kDouble); });
    refused("is not in group", [&] { memory.put(x, n); });
    refused("is not in group", [&] { memory.wait(-1, 1); });
    refused("got -1 signals", [&] { memory.wait(0, -1); });
    refused("there is no pad 2", [&] { memory.signal(0, 2); });
    refused("there is no pad -1", [&] { memory.wait(0, 1, -1); });
    refused("not contiguous", [&] { memory.put(at::ones({2, 3}).t(), 0); });
    refused("CPU tensors", [&] { memory.put(at::empty({2}, at::kMeta), 0); });
    refused("undefined", [&] { memory.put(at::Tensor(), 0); });
    refused("there is no row 4", [&] { memory.put_rows(x, at::tensor({0, 4}, at::kLong), 0); });
    refused("there is no row -1", [&] { memory.put_rows(x, at::tensor({-1}, at::kLong), 0); });
    refused("a list of int64", [&] { memory.put_rows(x, at::tensor({1}, at::kInt), 0); });
    refused("got 72 bytes", [&] { memory.put_rows(x, at::zeros({9}, at::kLong), 0); });
    refused("undefined", [&] { memory.get(at::Tensor(), 0); });
    expect_all(memory.local(), 0, "nothing was written");
  });
}

TEST_CASE("symmetric memory: where ranks share none it says so", "[comm][symmetric]") {
  for (const std::string transport : {"threads", "shm"}) {
    CHECK_NOTHROW(run_ranks(transport, 2, [](World& world) {
      dtensor::require(SymmetricMemory::is_available(*connect_all(world)), "test", "it is there");
    }));
  }
  CHECK_NOTHROW(run_ranks("gloo", 2, [](World& world) {
    auto all = connect_all(world, "dp");
    dtensor::require(!SymmetricMemory::is_available(*all), "test", "it is not there");
    dtensor::require(fails_with([&] { SymmetricMemory(*all, 8); }, "the ranks of group 'dp' share no memory"), "test", "refused");
    auto self = world.transport().connect("self", {world.rank()});
    SymmetricMemory own(*self, 8);  // a group of one does
    own.put(at::ones({1}, at::kDouble), 0);
    own.signal(0);
    own.wait(0, 1);
    expect_all(own.local().view(at::kDouble), 1, "of one rank");
  }));
  auto pretended = dtensor::comm::make_fake_transport(0, 4)->connect("dp", {0, 1, 2, 3});
  CHECK_FALSE(SymmetricMemory::is_available(*pretended));
  CHECK(fails_with([&] { SymmetricMemory(*pretended, 8); }, "hint: ask SymmetricMemory::is_available"));
}

TEST_CASE("symmetric memory: what ranks do there leaves events", "[comm][symmetric]") {
  where_memory_is_shared([](World& world) {
    auto all = connect_all(world, "ep");
    SymmetricMemory memory(*all, 64, 2);
    auto& events = world.local<dtensor::comm::Events>();
    const auto before = events.count();
    const int peer = 1 - world.rank();
    memory.put(at::ones({4}), peer);
    memory.signal(peer, 1);
    memory.wait(peer, 1, 1);
    memory.get(at::ones({2}, at::kDouble), peer);
    const std::vector<std::tuple<std::string, int64_t, int, uint64_t>> expected{{"put", 16, 0, 1}, {"signal", 0, 1, 1}, {"wait", 0, 1, 1},
                                                                                 {"get", 16, 0, 2}};
    dtensor::require(events.count() == before + 4, "test", "{} events", events.count() - before);
    for (uint64_t i = 0; i < 4; ++i) {
      const auto event = events.get(before + 1 + i);
      dtensor::require(std::tuple(std::string(name(event.kind)), event.bytes, event.tag, event.sequence) == expected[i] &&
                           event.root == peer && event.done > 0 && std::string_view(event.group) == "ep",
                       "test", "event {}: {} of {} bytes, tag {}, #{}", i, name(event.kind), event.bytes, event.tag, event.sequence);
    }
    all->barrier();
  }, {2});
}
