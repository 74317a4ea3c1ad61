// Generators behave on ranks as on one device: seeds, states, copies; what has drifted apart is found; and streams of a rank's own.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <thread>

using namespace dtensor;
using namespace dtensor::test;

namespace {

at::Generator default_generator() { return at::detail::getDefaultCPUGenerator(); }

// Plain and distributed draws in turns, with the default generator's state taken and set back, and with a generator made here.
Tensors program(const std::function<at::Tensor(const at::Tensor&)>& place) {
  const auto draw = [&](const c10::optional<at::Generator>& generator) { return place(torch::zeros({40, 50})).uniform_(0, 1, generator); };
  Tensors results;
  torch::manual_seed(3);
  results.push_back(draw({}));
  results.push_back(torch::randn({7}));
  const auto state = default_generator().get_state();
  auto fork = default_generator().clone();
  results.push_back(draw({}));
  default_generator().set_state(state);
  results.push_back(draw({}));  // the same again
  results.push_back(draw(fork));
  results.push_back(torch::full({1}, static_cast<int64_t>(default_generator().current_seed())));
  auto own = at::make_generator<at::CPUGeneratorImpl>(17);
  results.push_back(place(torch::zeros({2000}, torch::kDouble)).normal_(0, 1, own));
  results.push_back(at::randn({3}, own));
  own.set_current_seed(17);
  results.push_back(place(torch::zeros({2000}, torch::kDouble)).normal_(0, 1, own));
  results.push_back(torch::rand({3}));
  return results;
}

}  // namespace

TEST_CASE("random generators: seeds and states and copies", "[random]") {
  const auto expected = program([](const at::Tensor& t) { return t; });
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh(
        {3},
        [&](const DeviceMesh& mesh) {
          for (const auto& placement : {shard(0), replicate()}) {
            const auto got = program([&](const at::Tensor& t) { return distribute_tensor(t, mesh, {placement}).tensor(); });
            for (size_t i = 0; i < got.size(); ++i) {
              const auto whole = is_dtensor(got[i]) ? full_tensor(got[i]) : got[i];
              require(whole.equal(expected[i]), "test", "result {} under {} differs", i, placement.str());
            }
          }
        },
        transport));
  }
}

TEST_CASE("random generators: without ranks plain and distributed draws take turns on one stream", "[random]") {
  torch::manual_seed(4);
  const auto first = torch::rand({3}), second = torch::rand({2000}), third = torch::rand({3});
  const auto mesh = init_device_mesh(torch::kCPU, {1});
  torch::manual_seed(4);
  CHECK(torch::rand({3}).equal(first));
  CHECK(full_tensor(distribute_tensor(torch::zeros({2000}), mesh, {shard(0)}).tensor().uniform_()).equal(second));
  CHECK(torch::rand({3}).equal(third));
}

TEST_CASE("random generators: ranks that have drifted apart are named", "[random]") {
  CHECK_THROWS_WITH(on_mesh({3},
                            [](const DeviceMesh& mesh) {
                              torch::manual_seed(mesh.world().rank() == 1 ? 5 : 6);
                              check_generators(mesh);
                            }),
                    says("the generators of ranks 1 and of rank 0 have drifted apart"));
  CHECK_THROWS_WITH(on_mesh({2, 2},
                            [](const DeviceMesh& mesh) {
                              torch::manual_seed(6);
                              const auto x = distribute_tensor(torch::zeros({8}), mesh, {shard(0), replicate()}).tensor();
                              if (mesh.world().rank() == 3) torch::rand({2});
                              x.uniform_();
                            }),
                    says("the generators of ranks 3 and of rank 0 have drifted apart"));
  CHECK_THROWS_WITH(on_mesh({2},
                            [](const DeviceMesh& mesh) {
                              torch::manual_seed(6);
                              set_generator_check(GeneratorCheck::always);
                              const auto x = distribute_tensor(torch::zeros({8}), mesh, {shard(0)}).tensor();
                              for (int i = 0; i < 40; ++i) x.uniform_();
                              if (mesh.world().rank() == 1) torch::rand({2});
                              x.uniform_();
                            }),
                    says("aten::uniform_"));
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    set_generator_check(GeneratorCheck::off);
    torch::manual_seed(mesh.world().rank());
    distribute_tensor(torch::zeros({8}), mesh, {shard(0)}).tensor().uniform_();
  }));
}

TEST_CASE("random generators: one that threads share is refused", "[random]") {
  auto shared = at::make_generator<at::CPUGeneratorImpl>(1);
  CHECK_THROWS_WITH(on_mesh({2},
                            [&](const DeviceMesh& mesh) {
                              at::rand({3}, shared);
                              mesh.world().barrier();
                            }),
                    says("draw from one at::Generator"));
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh&) { at::rand({3}, shared.clone()); }));
}

TEST_CASE("random generators: a rank's own stream", "[random]") {
  std::vector<at::Tensor> own(3), again(3), next(3);
  const auto run = [&](std::vector<at::Tensor>& to) {
    on_mesh({3}, [&](const DeviceMesh& mesh) {
      const int rank = mesh.world().rank();
      Spmd spmd(mesh);
      torch::manual_seed(8);
      const auto before = torch::rand({4});
      {
        const auto local = rank_local_random();
        to[rank] = torch::rand({4});
        require(!is_dtensor(to[rank]), "test", "a factory made a DTensor");
      }
      const auto after = full_tensor(torch::rand({4}));
      {
        const auto local = rank_local_random();
        next[rank] = torch::rand({4});
        auto x = distribute_tensor(torch::zeros({3, 100}), mesh, {shard(0)}).tensor().uniform_();
        require(!full_tensor(x)[0].equal(full_tensor(x)[1]), "test", "ranks drew the same");
      }
      torch::manual_seed(8);
      const auto both = full_tensor(torch::cat({torch::rand({4}), torch::rand({4})}));
      require(both.equal(torch::cat({full_tensor(before), after})), "test", "the common stream moved");
    });
  };
  run(own);
  run(again);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(own[rank].equal(again[rank]));
    CHECK(!own[rank].equal(next[rank]));
    CHECK(!own[rank].equal(own[(rank + 1) % 3]));
  }
  CHECK_THROWS_WITH(on_mesh({2},
                            [&](const DeviceMesh& mesh) {
                              const auto local = rank_local_random();
                              distribute_tensor(torch::zeros({3}), mesh, {replicate()}).tensor().uniform_();
                            }),
                    says("outside of dt::rank_local_random"));
}

TEST_CASE("random generators: the environment says when they are compared", "[random]") {
  const auto in_a_new_thread = [](const char* value) {
    value ? setenv("DTENSOR_CHECK_GENERATORS", value, 1) : unsetenv("DTENSOR_CHECK_GENERATORS");
    GeneratorCheck found{};
    std::thread([&] { found = generator_check(); }).join();
    unsetenv("DTENSOR_CHECK_GENERATORS");
    return found;
  };
  CHECK(in_a_new_thread("0") == GeneratorCheck::off);
  CHECK(in_a_new_thread("off") == GeneratorCheck::off);
  CHECK(in_a_new_thread("first") == GeneratorCheck::first);
  CHECK(in_a_new_thread("1") == GeneratorCheck::always);
  CHECK(in_a_new_thread("always") == GeneratorCheck::always);
#ifdef NDEBUG
  CHECK(in_a_new_thread(nullptr) == GeneratorCheck::first);
#else
  CHECK(in_a_new_thread(nullptr) == GeneratorCheck::always);
#endif
}

// torch::randn(sizes) and those that take no generator count as replicated, or as like their operand, as those do that take one.
TEST_CASE("random generators: factories and operators without a generator are compared", "[random]") {
  using Draw = std::function<void(const at::Tensor&)>;
  const std::vector<std::pair<const char*, Draw>> draws = {
      {"randn", [](auto&) { torch::randn({2}); }},
      {"rand", [](auto&) { torch::rand({2}); }},
      {"randint", [](auto&) { torch::randint(9, {2}); }},
      {"randint.low", [](auto&) { torch::randint(2, 9, {2}); }},
      {"randperm", [](auto&) { torch::randperm(4); }},
      {"normal", [](auto&) { torch::normal(0, 1, {2}); }},
      {"rand_like", [](auto& x) { torch::rand_like(x); }},
      {"randn_like", [](auto& x) { torch::randn_like(x); }},
      {"randint_like", [](auto& x) { torch::randint_like(x, 9); }},
      {"native_dropout", [](auto& x) { torch::native_dropout(x, 0.5, true); }},
      {"dropout", [](auto& x) { torch::dropout(x, 0.5, true); }},
      {"bernoulli", [](auto& x) { torch::bernoulli(x); }},
      {"multinomial", [](auto& x) { torch::multinomial(x, 2); }},
  };
  for (const auto* transport : {"threads", "gloo"}) {
    for (const auto& [name, draw] : draws) {
      for (const auto& placement : {shard(0), replicate()}) {
        INFO(name << " " << placement.str() << " " << transport);
        CHECK_THROWS_WITH(on_mesh(
                              {2},
                              [&, &draw = draw](const DeviceMesh& mesh) {
                                Spmd spmd(mesh);
                                const auto x = distribute_tensor(at::full({8}, 0.5), mesh, {placement}).tensor();
                                torch::manual_seed(1 + mesh.world().rank());
                                draw(x);
                              },
                              transport),
                          says("the generators of ranks 1 and of rank 0 have drifted apart"));
      }
    }
  }
}

TEST_CASE("random generators: replicated ones are not drawn from a rank's own stream", "[random]") {
  const auto draws = {+[](const at::Tensor& x) { torch::rand_like(x); }, +[](const at::Tensor& x) { torch::native_dropout(x, 0.5, true); },
                      +[](const at::Tensor& x) { x.clone().uniform_(); }};
  for (const auto draw : draws) {
    CHECK_THROWS_WITH(on_mesh({2},
                              [&](const DeviceMesh& mesh) {
                                const auto x = distribute_tensor(at::ones({3}), mesh, {replicate()}).tensor();
                                const auto local = rank_local_random();
                                draw(x);
                              }),
                      says("outside of dt::rank_local_random"));
  }
}

// After the first ones not every draw is compared, but some are as long as the program runs.
TEST_CASE("random generators: what drifts apart later is found", "[random]") {
  for (const auto* transport : {"threads", "shm", "gloo"}) {
    for (const int after : {20, 100, 700, 1500}) {
      std::atomic<int> drawn{0};
      CHECK_THROWS_WITH(on_mesh(
                            {2},
                            [&](const DeviceMesh& mesh) {
                              Spmd spmd(mesh);
                              set_generator_check(GeneratorCheck::first);
                              torch::manual_seed(6);
                              for (int i = 0; i < 5000; ++i) {
                                if (i == after && mesh.world().rank() == 1) torch::manual_seed(7);
                                torch::rand({2});
                                if (mesh.world().rank() == 0) ++drawn;
                              }
                            },
                            transport),
                        says("the generators of ranks 1 and of rank 0 have drifted apart"));
      CHECK(drawn >= after);
      CHECK(drawn <= after + 1024);
    }
  }
}
