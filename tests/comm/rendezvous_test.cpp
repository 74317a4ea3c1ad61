// How ranks that are processes find each other.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/rendezvous/rendezvous.hpp"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::comm::Milliseconds;

TEST_CASE("a rendezvous that is not complete names the address and the missing ranks", "[comm][gloo]") {
  dtensor::comm::GlooOptions options;
  options.size = 3;
  options.rank = 1;
  options.port = 1;
  options.deadline = Milliseconds(500);
  CHECK(fails_with([&] { make_gloo_transport(options); }, "127.0.0.1:1 within 0.5 s: nobody answers there; missing: rank 0"));
  options.host = "no-such-host.invalid";
  CHECK(fails_with([&] { make_gloo_transport(options); }, "no-such-host.invalid:1"));

  options.host = "127.0.0.1";
  options.port = 29777;
  options.deadline = Milliseconds(2000);
  std::vector<char> refused(2);
  std::vector<std::thread> ranks;
  for (int rank : {0, 1}) {
    ranks.emplace_back([&, rank, mine = options]() mutable {
      mine.rank = rank;
      refused[rank] = fails_with([&] { make_gloo_transport(mine); }, "missing: rank 2");
    });
  }
  for (auto& rank : ranks) rank.join();
  CHECK(refused[0]);
  CHECK(refused[1]);
}

TEST_CASE("a rank 0 that may open no more files says so", "[comm][gloo]") {
  dtensor::comm::GlooOptions options;
  options.size = 2;
  options.deadline = Milliseconds(20'000);
  const auto listener = std::make_shared<dtensor::comm::Listener>(options.host, 0);
  options.port = listener->port();
  const auto rank1 = dtensor::comm::Socket::dial(options.host, options.port, dtensor::comm::Clock::now() + options.deadline);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = dup(0);
  close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  const bool said = fails_with([&] { dtensor::comm::Rendezvous(options, listener); }, "Too many open files; missing: rank 1");
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK(said);
}

TEST_CASE("rank 0 is reached over IPv6 and IPv4", "[comm]") {
  using dtensor::comm::Clock;
  using dtensor::comm::Socket;
  try {
    dtensor::comm::Listener("::1", 0);
  } catch (const dtensor::Error&) {
    DTENSOR_SKIP("no IPv6 here");
  }
  dtensor::comm::Listener listener("a host with several addresses", 0);
  for (const std::string address : {"::1", "127.0.0.1"}) {
    INFO(address);
    const auto end = Clock::now() + Milliseconds(2000);
    Socket caller, called;
    CHECK_NOTHROW(caller = Socket::dial(address, listener.port(), end));
    CHECK_NOTHROW(called = listener.accept(end));
    if (called.open()) CHECK(called.local_address() == address);
  }
}
