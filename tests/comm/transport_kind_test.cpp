// Transports are found by their names, and one of a user's own needs no list to be in.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/comm/transport_kind.hpp>

#include <algorithm>
#include <atomic>
#include <memory>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::World;
namespace comm = dtensor::comm;

TEST_CASE("transports register themselves and say what is missing", "[comm]") {
  std::vector<std::string> names;
  for (const auto* kind : comm::transport_kinds()) {
    names.push_back(kind->name);
    CHECK((!kind->missing.empty() || kind->threads || kind->process));
  }
  for (const auto* known : {"fake", "gloo", "nccl", "shm", "threads"}) CHECK(std::ranges::find(names, known) != names.end());
  CHECK(fails_with([] { comm::transport_kind("pigeon"); }, "unknown transport; got 'pigeon'; expected one of fake, gloo, nccl"));
  if (!comm::has_nccl_transport())
    CHECK(fails_with([] { comm::transport_kind("nccl"); }, "this build has no transport 'nccl'; hint: configure with"));
}

TEST_CASE("a transport of one's own is launched by its name", "[comm]") {
  const auto made = std::make_shared<int>(0);  // the transport stays
  const comm::RegisterTransport own({.name = "own", .threads = [made](const comm::ThreadsJob& job) {
    *made = job.ranks;
    return comm::transport_kind("threads").threads(job);
  }});
  dtensor::LaunchOptions options;
  options.ranks = 3;
  options.transport = "own";
  std::atomic<int> sum{0};
  CHECK_NOTHROW(dtensor::launch(options, [&](World& world) { sum += world.size(); }));
  CHECK(*made == 3);
  CHECK(sum == 9);
  const comm::RegisterTransport missing({.name = "own", .missing = "it was a test"});
  CHECK_NOTHROW(comm::transport_kind("own"));  // what is there stays
}
