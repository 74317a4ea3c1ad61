// Guards that are held by pointers: they end in any order, on any thread, and after what they were made in.
#include "tests/support/core_support.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <optional>
#include <thread>

using namespace dtensor;
using namespace dtensor::test;

namespace {

const DeviceMesh* made_on() {
  const auto tensor = torch::zeros({2});
  static thread_local std::optional<DeviceMesh> mesh;
  if (!is_dtensor(tensor)) return nullptr;
  mesh = DTensor(tensor).mesh();
  return &*mesh;
}

// What factories make, and what the region says.
bool is_on(const DeviceMesh* mesh) {
  const auto* got = made_on();
  const auto* current = Spmd::current();
  return (mesh ? got && *got == *mesh : !got) && (mesh ? current && *current == *mesh : !current);
}

template <class Body>
void on_a_thread(const Body& body) {
  std::thread(body).join();
}

}  // namespace

TEST_CASE("regions: Spmd and NoSpmd end in any order", "[spmd]") {
  Alone rank(4);
  const auto line = init_device_mesh(torch::kCPU, {4}), plane = init_device_mesh(torch::kCPU, {2, 2});
  auto outer = std::make_unique<Spmd>(line), inner = std::make_unique<Spmd>(plane);
  REQUIRE(is_on(&plane));
  outer.reset();
  REQUIRE(is_on(&plane));
  inner.reset();
  REQUIRE(is_on(nullptr));

  outer = std::make_unique<Spmd>(line);
  auto plain = std::make_unique<NoSpmd>();
  inner = std::make_unique<Spmd>(plane);
  plain.reset();
  REQUIRE(is_on(&plane));
  outer.reset();
  REQUIRE(is_on(&plane));
  plain = std::make_unique<NoSpmd>();
  inner.reset();
  REQUIRE(is_on(nullptr));
  plain.reset();
  REQUIRE(is_on(nullptr));

  std::optional<Spmd> a(line), b(plane), c(line);
  b.reset();
  REQUIRE(is_on(&line));
  c.reset();
  REQUIRE(is_on(&line));
  a.reset();
  REQUIRE(is_on(nullptr));
}

TEST_CASE("regions: Spmd ends on another thread", "[spmd]") {
  Alone rank(4);
  const auto line = init_device_mesh(torch::kCPU, {4}), plane = init_device_mesh(torch::kCPU, {2, 2});
  auto outer = std::make_unique<Spmd>(line), inner = std::make_unique<Spmd>(plane);
  bool there = false;
  on_a_thread([&] {
    World::Use use(rank.world);
    const Spmd own(line);
    inner.reset();
    there = is_on(&line);
  });
  REQUIRE(there);
  REQUIRE(is_on(&plane));  // until it looks
  { NoSpmd look; }
  REQUIRE(is_on(&line));
  on_a_thread([&] { outer.reset(); });
  inner = std::make_unique<Spmd>(plane);
  REQUIRE(is_on(&plane));
  inner.reset();
  REQUIRE(is_on(nullptr));

  on_a_thread([&] {  // which ends before its region
    World::Use use(rank.world);
    outer = std::make_unique<Spmd>(line);
  });
  outer.reset();
  REQUIRE(is_on(nullptr));
}

TEST_CASE("regions: DeferredInit ends in any order and on any thread", "[deferred]") {
  Alone rank(2);
  set_generator_check(GeneratorCheck::off);  // nobody would answer
  const auto mesh = init_device_mesh(torch::kCPU, {2});
  const auto records = [] { return DeferredInit::active() && is_deferred(torch::ones({3})); };
  auto outer = std::make_unique<DeferredInit>(mesh), inner = std::make_unique<DeferredInit>(mesh);
  outer.reset();
  REQUIRE(records());
  const auto made = torch::ones({3});
  inner.reset();
  REQUIRE(!DeferredInit::active());
  REQUIRE(is_on(nullptr));
  materialize(made);
  REQUIRE(full_tensor(made).equal(torch::ones({3})));

  outer = std::make_unique<DeferredInit>(mesh);
  auto spmd = std::make_unique<Spmd>(mesh);
  outer.reset();
  REQUIRE(!DeferredInit::active());
  REQUIRE(is_on(&mesh));
  REQUIRE(!is_deferred(torch::ones({3})));
  spmd.reset();
  REQUIRE(is_on(nullptr));

  outer = std::make_unique<DeferredInit>(mesh);
  on_a_thread([&] { outer.reset(); });
  REQUIRE(records());
  {
    const auto sum = torch::ones({3}).sum();
    REQUIRE(sum.item<double>() == 3);  // looks, in the middle of a call
  }
  REQUIRE(!DeferredInit::active());
  REQUIRE(is_on(nullptr));
  set_generator_check(GeneratorCheck::first);
}

TEST_CASE("regions: a stream of the rank's own ends in any order and after its rank", "[random]") {
  std::unique_ptr<RankLocalRandom> outer, inner;
  {
    Alone rank(2);
    const auto common = World::current().generator();
    const auto draws_common = [&] { return World::current().generator() == common && !RankLocalRandom::active(); };
    outer = std::make_unique<RankLocalRandom>(), inner = std::make_unique<RankLocalRandom>();
    outer.reset();
    REQUIRE(RankLocalRandom::active());
    REQUIRE(!draws_common());
    inner.reset();
    REQUIRE(draws_common());
    inner = std::make_unique<RankLocalRandom>();
    on_a_thread([&] { inner.reset(); });
    { NoSpmd look; }
    REQUIRE(draws_common());
    inner = std::make_unique<RankLocalRandom>();
  }
  inner.reset();
  REQUIRE(!RankLocalRandom::active());
}

TEST_CASE("regions: a thread leaves worlds in any order", "[spmd]") {
  auto& before = World::current();
  auto first = std::make_unique<Alone>(2), second = std::make_unique<Alone>(3);
  first.reset();
  REQUIRE(World::current().size() == 3);
  second.reset();
  REQUIRE(&World::current() == &before);
}
