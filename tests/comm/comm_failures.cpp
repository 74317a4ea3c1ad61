// Ranks that throw, leave, diverge, stall or never come: every other rank throws an error that says so, soon.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/rendezvous/membership.hpp"

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <sys/socket.h>
#include <unistd.h>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::ReduceOp;
using dtensor::World;
using dtensor::comm::Communicator;
using dtensor::comm::Milliseconds;

namespace {

struct Failures {
  std::vector<std::string> of_rank;
  std::string of_launch;
  double seconds = 0;
};

// Runs `body` and collects what each rank, and launch itself, threw.
Failures collect(const std::string& transport, int ranks, const std::function<void(World&)>& body, int deadline_ms = 60'000) {
  Failures failures;
  failures.of_rank.resize(ranks);
  const auto start = std::chrono::steady_clock::now();
  const auto text = [](const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    return std::string(ours ? ours->what_without_backtrace() : error.what());
  };
  try {
    run_ranks(transport, ranks, [&](World& world) {
      try {
        body(world);
      } catch (const std::exception& error) {
        failures.of_rank[world.rank()] = text(error);
        throw;
      }
    }, deadline_ms);
  } catch (const std::exception& error) {
    failures.of_launch = text(error);
  }
  failures.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return failures;
}

bool contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    if (text.find(part) == std::string::npos) return false;
  }
  return true;
}

// All real transports.
void on_each(const std::function<void(const std::string&)>& check) {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    INFO(transport);
    check(transport);
  }
}

// The collectives of rank 1 and of all other ranks differ.
void check_divergence(const std::string& what, const std::function<void(Communicator&)>& others,
                      const std::function<void(Communicator&)>& rank1, const std::vector<std::string>& parts) {
  on_each([&](const std::string& transport) {
    const auto failures = collect(transport, 3, [&](World& world) {
      auto all = connect_all(world);
      all->barrier();
      (world.rank() == 1 ? rank1 : others)(*all);
      all->barrier();  // for a rank that the difference does not concern
    });
    for (int rank : {0, 1, 2}) {
      INFO(what << ", rank " << rank << ": " << failures.of_rank[rank]);
      CHECK(contains(failures.of_rank[rank], {"rank 1", "#2"}));
      if (failures.of_rank[rank].find("diverged") != std::string::npos) CHECK(contains(failures.of_rank[rank], parts));
    }
    INFO(failures.of_launch);
    CHECK(contains(failures.of_launch, {"diverged"}));
    CHECK(failures.seconds < 20);
  });
}

std::function<void(Communicator&)> reduce_of(int64_t count, at::ScalarType dtype, ReduceOp op) {
  return [=](Communicator& all) { all.all_reduce(at::ones({count}, dtype), op).get(); };
}

}  // namespace

TEST_CASE("a rank that throws ends the others with its error", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    for (int64_t count : {4, 100'000}) {
      const auto failures = collect(transport, 4, [&](World& world) {
        auto all = connect_all(world);
        for (int i = 0; i < 3; ++i) {
          if (i == 2 && world.rank() == 1) throw std::runtime_error("out of cheese");
          all->all_reduce(at::ones({count}), ReduceOp::sum).get();
        }
      });
      CHECK(failures.of_launch == "out of cheese");
      for (int rank : {0, 2, 3}) {
        INFO(failures.of_rank[rank]);
        CHECK(contains(failures.of_rank[rank], {"rank 1 failed: out of cheese", "all_reduce(sum) #"}));
      }
      CHECK(failures.seconds < 20);
    }
  });
}

TEST_CASE("a rank that throws an error without a text has failed", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    const auto failures = collect(transport, 2, [&](World& world) {
      auto all = connect_all(world);
      if (world.rank() == 1) throw std::runtime_error("");
      all->barrier();
    });
    INFO(failures.of_rank[0]);
    CHECK(contains(failures.of_rank[0], {"rank 1 failed: an exception without a text"}));
  });
}

TEST_CASE("a failure reaches ranks that never meet the one that failed", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    const auto failures = collect(transport, 4, [](World& world) {
      const int first = world.rank() / 2 * 2;
      auto pair = world.transport().connect("pair", {first, first + 1});
      if (world.rank() == 3) throw std::runtime_error("out of cheese");
      if (world.rank() == 0) std::this_thread::sleep_for(Milliseconds(50));
      if (world.rank() == 1) return pair->recv(at::ones({3}), 0).get(), void();  // rank 0 never sends
      pair->barrier();
    });
    CHECK(failures.of_launch == "out of cheese");
    for (int rank : {0, 1, 2}) CHECK(contains(failures.of_rank[rank], {"rank 3 failed: out of cheese"}));
    CHECK(failures.seconds < 20);
  });
}

TEST_CASE("a rank that leaves early is named by those that wait for it", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    const auto failures = collect(transport, 3, [](World& world) {
      auto all = connect_all(world);
      const std::vector<int64_t> counts(3, 300'000);
      all->all_to_all(at::ones({900'000}), counts, counts);
      auto last = all->all_reduce(at::ones({100'000}), ReduceOp::sum);
      if (world.rank() == 1) return;  // without a wait: the others still get the result
      dtensor::require(std::move(last).get()[7].item<float>() == 3, "test", "the last result");
      all->broadcast(at::ones({3}), 0).get();
    });
    CHECK(failures.of_rank[1].empty());
    for (int rank : {0, 2}) {
      INFO(failures.of_rank[rank]);
      CHECK(contains(failures.of_rank[rank], {"rank ", "broadcast(root 0) #3"}));
    }
    INFO(failures.of_launch);
    CHECK(contains(failures.of_launch, {"rank 1 has left"}));
    CHECK(failures.seconds < 20);
  });
}

TEST_CASE("a failure is told also when rank 0 left more than a deadline before", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    const auto failures = collect(transport, 3, [](World& world) {
      auto all = connect_all(world);
      if (world.rank() == 0) return;
      std::this_thread::sleep_for(Milliseconds(3500));
      if (world.rank() == 1) throw std::runtime_error("out of cheese");
      all->recv(at::ones({3}), 1).get();
    }, 1000);
    INFO(failures.of_rank[2]);
    CHECK(contains(failures.of_rank[2], {"rank 1 failed: out of cheese"}));
    CHECK(failures.seconds < 20);
  });
}

TEST_CASE("at its end a rank does not wait for news that nobody brings", "[comm]") {
  using dtensor::comm::Frame;
  using dtensor::comm::Membership;
  using dtensor::comm::Socket;
  // How long rank 0 or 1 of three waits whose peer says what we have it say.
  const auto seconds_waited = [](int rank, const std::function<void(Socket&)>& play) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    Socket peer(ends[1]);
    std::vector<Socket> sockets(3);
    sockets[1 - rank] = Socket(ends[0]);
    Membership membership(rank, 3, std::move(sockets), [] {});
    membership.leave("", {});
    play(peer);
    const auto start = std::chrono::steady_clock::now();
    membership.wait_until_empty(Milliseconds(rank == 0 ? 500 : 60'000));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  CHECK(seconds_waited(0, [](Socket&) {}) < 20);  // rank 1 was stopped
  CHECK(seconds_waited(1, [](Socket& rank0) {
    rank0.send({Frame::Kind::left, 0, ""});
    rank0.close();
  }) < 20);
}

TEST_CASE("ranks that diverge are told both calls", "[comm][gloo]") {
  const auto usual = reduce_of(12, at::kFloat, ReduceOp::sum);
  check_divergence("kind", usual, [](Communicator& all) { all.all_gather(at::ones({4}), {4, 4, 4}).get(); },
                   {"all_reduce(sum) #2 of Float[12]", "all_gather #2 of Float[4]"});
  check_divergence("size", usual, reduce_of(13, at::kFloat, ReduceOp::sum), {"Float[12]", "Float[13]"});
  check_divergence("large size", reduce_of(100'000, at::kFloat, ReduceOp::sum), reduce_of(100'001, at::kFloat, ReduceOp::sum),
                   {"Float[100000]", "Float[100001]"});
  check_divergence("dtype", usual, reduce_of(12, at::kDouble, ReduceOp::sum), {"Float[12]", "Double[12]"});
  check_divergence("op", usual, reduce_of(12, at::kFloat, ReduceOp::max), {"all_reduce(sum)", "all_reduce(max)"});
  check_divergence("root", [](Communicator& all) { all.broadcast(at::ones({2}), 0).get(); },
                   [](Communicator& all) { all.broadcast(at::ones({2}), 2).get(); }, {"root 0", "root 2"});
  check_divergence("counts", [](Communicator& all) { all.reduce_scatter(at::ones({6}), {2, 2, 2}, ReduceOp::sum).get(); },
                   [](Communicator& all) { all.reduce_scatter(at::ones({6}), {1, 2, 3}, ReduceOp::sum).get(); },
                   {"reduce_scatter", "with other lengths of the ranks' pieces"});
  check_divergence("pieces", [](Communicator& all) { all.all_to_all(at::ones({3}), {1, 1, 1}, {1, 1, 1}).get(); },
                   [](Communicator& all) { all.all_to_all(at::ones({4}), {2, 1, 1}, {1, 1, 1}).get(); },
                   {"rank 1 sends 2 elements to rank 0, which expects 1"});
}

TEST_CASE("a message of another size is refused", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    const auto failures = collect(transport, 2, [](World& world) {
      auto all = connect_all(world);
      if (world.rank() == 0) all->send(at::ones({3}), 1, 7);
      if (world.rank() == 1) all->recv(at::ones({4}), 0, 7).get();
    });
    INFO(failures.of_rank[1]);
    CHECK(contains(failures.of_rank[1], {"send(to 1, tag 7) #1 of Float[3]", "recv(from 0, tag 7) #1 of Float[4]"}));
  });
}

TEST_CASE("a message on another device is refused", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    CHECK_NOTHROW(run_ranks(transport, 2, [&](World& world) {
      const auto elsewhere = at::empty({3}, at::kMeta);
      auto all = connect_all(world);
      const auto moves =
          (transport == "threads" ? "the threads" : "the gloo") + std::string(" transport moves CPU tensors; got one on meta");
      dtensor::require(fails_with([&] { all->send(elsewhere, 1 - world.rank()); }, moves), "test", "send");
    }));
  });
}

TEST_CASE("a wait ends at the deadline and names who did not come", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    std::atomic<int> failed{0};
    const auto failures = collect(transport, 3, [&](World& world) {
      auto all = connect_all(world, "tp");
      all->barrier();
      if (world.rank() == 1) {
        while (failed < 2) std::this_thread::sleep_for(Milliseconds(10));
        return;
      }
      try {
        all->all_reduce(at::ones({100'000}), ReduceOp::sum).get();
      } catch (...) {
        ++failed;
        throw;
      }
    }, 1000);
    for (int rank : {0, 2}) {
      INFO(failures.of_rank[rank]);
      CHECK(contains(failures.of_rank[rank], {"rank 1", "all_reduce(sum) #2", "'tp'"}));
    }
    INFO(failures.of_launch);
    CHECK(contains(failures.of_launch, {"did not complete within 1 s", "rank 1 did not call it"}));
    CHECK(failures.seconds > 0.9);
    CHECK(failures.seconds < 20);
  });
}

TEST_CASE("a rank that comes when the others have given up does not get what they have overwritten since", "[comm][gloo]") {
  on_each([](const std::string& transport) {
    constexpr int64_t kCount = 1'500'000;
    std::atomic<int> failed{0};
    std::atomic<bool> came{false};
    const auto failures = collect(transport, 3, [&](World& world) {
      auto all = connect_all(world);
      all->barrier();
      const auto input = at::ones({kCount});
      const bool late = world.rank() == 1;
      while (late && failed < 2) std::this_thread::sleep_for(Milliseconds(10));
      try {
        const auto all_ones = all->all_to_all(input, {kCount / 3, kCount / 3, kCount / 3}, {kCount / 3, kCount / 3, kCount / 3}).get();
        came = true;
        dtensor::require(all_ones.eq(1).all().item<bool>(), "test", "overwritten");
      } catch (...) {
        input.zero_();
        if (late) came = true;
        else ++failed;
        while (!came) std::this_thread::sleep_for(Milliseconds(10));
        throw;
      }
    }, 1000);
    for (int rank : {0, 2}) {
      INFO(transport << ", rank " << rank << ": " << failures.of_rank[rank]);
      CHECK(contains(failures.of_rank[rank], {"all_to_all #2"}));
    }
    INFO(transport << ", rank 1: " << failures.of_rank[1]);
    CHECK(failures.of_rank[1].find("overwritten") == std::string::npos);
    CHECK(failures.seconds < 20);
  });
}

// A rank of comm_processes.sh, started by dtensor-run: some collectives, and in the middle what DTENSOR_TEST_MODE says
// ("kill:1": rank 1 kills itself). By itself it is a job of two threads.
TEST_CASE("a rank of a job of processes", "[comm][rank-program]") {
  const char* setting = std::getenv("DTENSOR_TEST_MODE");
  const std::string mode = setting ? setting : "";
  const auto colon = mode.find(':');
  const int chosen = colon == std::string::npos ? -1 : std::atoi(mode.c_str() + colon + 1);
  const auto what = mode.substr(0, colon);
  const bool exchanges = what == "kill-exchanging";
  const int64_t count = what == "kill-midway" || exchanges ? 20'000'000 : 50'000;
  const auto body = [&](World& world) {
    auto all = connect_all(world);
    for (int i = 0; i < 6; ++i) {
      if (i == 3 && world.rank() == chosen) {
        if (what == "kill") std::raise(SIGKILL);
        if (what == "kill-midway" || exchanges) {
          std::thread([] {
            std::this_thread::sleep_for(Milliseconds(20));
            std::raise(SIGKILL);
          }).detach();
        }
        if (what == "exit") std::_Exit(3);
        if (what == "throw") throw std::runtime_error("out of cheese");
        if (what == "leave") return;
        if (what == "stall") std::this_thread::sleep_for(std::chrono::minutes(10));
        if (what == "diverge") all->barrier();
      }
      if (exchanges) {
        const std::vector<int64_t> counts(world.size(), count);
        const auto last = all->all_to_all(at::full({count * world.size()}, world.rank()), counts, counts).get().slice(0, -count);
        dtensor::require(last.eq(world.size() - 1).all().item<bool>(), "test", "the last piece");
        continue;
      }
      const auto sum = all->all_reduce(at::full({count}, world.rank()), ReduceOp::sum).get();
      const int expected = world.size() * (world.size() - 1) / 2;
      dtensor::require(sum.to(at::kDouble).eq(expected).all().item<bool>(), "test", "the sum");
    }
    if (world.rank() == 0) std::printf("%d ranks over %s\n", world.size(), std::string(world.transport().name()).c_str());
  };
  const char* transport = std::getenv("DTENSOR_TEST_TRANSPORT");
  std::string choice = std::string("--transport=") + (transport ? transport : "");
  char program[] = "dtensor-tests", ranks[] = "--ranks=2";
  char* argv[] = {program, ranks, choice.data(), nullptr};
  CHECK(dtensor::launch(3, argv, body) == 0);
}
