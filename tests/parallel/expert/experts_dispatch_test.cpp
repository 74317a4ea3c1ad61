// What tokens that travel to experts send, counted, and which way is taken.
#include "tests/support/experts_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/observe/comm_debug.hpp>

namespace dtensor::test::experts {

namespace {

// Bytes of rows that all ranks together sent to others, in a forward and a backward pass; 8 bytes an element.
double bytes_of_rows(const CommDebugMode& counted, int ranks) {
  using comm::Collective;
  const double others = ranks - 1;
  return static_cast<double>(counted.bytes(Collective::all_gather)) * others +
         static_cast<double>(counted.bytes(Collective::reduce_scatter)) * others / ranks;
}

// Token t chooses experts t, t + 1, ..., so that all are equally busy and each rank's tokens go everywhere alike.
MixCase even_case(const MixSizes& sizes) {
  auto c = mix_case(sizes);
  const NoSpmd plain;
  const auto tokens = c.chosen.numel() / sizes.k;
  c.chosen = (torch::arange(tokens).unsqueeze(1) + torch::arange(sizes.k)).remainder(sizes.experts).view(c.chosen.sizes());
  return c;
}

}  // namespace

TEST_CASE("dispatch: expected ranks of a token are those of the formula", "[experts]") {
  const auto is = [](int64_t experts, int64_t ranks, int64_t k, double expected) {
    return std::abs(expert::expected_ranks(experts, ranks, k) - expected) < 1e-4;
  };
  REQUIRE(is(64, 8, 8, 5.4326));
  REQUIRE(is(256, 8, 8, 5.2947));
  REQUIRE(is(256, 64, 8, 7.6758));
  REQUIRE(is(64, 4, 6, 3.3453));
  REQUIRE(is(8, 4, 2, 1.8571));
  REQUIRE(is(8, 2, 2, 1.5714));
  REQUIRE(is(8, 1, 2, 1));
  // Experts that choose, each half of the tokens: of two on a rank, none has a token in a quarter of the cases.
  REQUIRE(std::abs(expert::expected_ranks(4, 2, 2, true) - 1.5) < 1e-12);
  REQUIRE(expert::expected_ranks(4, 2, 4, true) == 2);
  REQUIRE(std::abs(expert::expected_ranks(4, 4, 1, true) - 1) < 1e-12);
}

TEST_CASE("dispatch: the automatic way sends the least", "[experts]") {
  const std::vector<CommCost> free{{0, 1e9, 1e10}};
  const auto way = [&](int64_t ranks, int64_t k, int64_t experts) {
    return expert::cheapest_dispatch({.ranks = ranks, .tokens = 4096, .dim = 1024, .k = k, .experts = experts}, free);
  };
  REQUIRE(way(8, 1, 64) == "alltoall");
  REQUIRE(way(8, 8, 64) == "deduplicated");
  REQUIRE(way(2, 8, 64) == "deduplicated");  // nearly all tokens go to both ranks
  REQUIRE(expert::cheapest_dispatch({.ranks = 2, .tokens = 64, .dim = 8, .k = 8, .experts = 8}, {{1e-3, 1e9, 1e10}}) == "allgather");
  REQUIRE(expert::cheapest_dispatch({.ranks = 4, .tokens = 64, .dim = 8, .k = 2, .experts = 8, .whole = true}, {{1e-3, 1e9, 1e10}}) ==
          "allgather");
  for (const int64_t ranks : {2, 4, 8, 16}) {
    for (const int64_t k : {1, 2, 4, 8}) {
      const expert::DispatchShape shape{.ranks = ranks, .tokens = 512, .dim = 64, .k = k, .experts = 16};
      const auto chosen = expert::cheapest_dispatch(shape, free);
      for (const auto& other : expert::dispatches()) REQUIRE(expert::bytes_sent(chosen, shape) <= expert::bytes_sent(other, shape));
    }
  }
  REQUIRE_THROWS_WITH(expert::bytes_sent("pigeon", {}), says("no way to dispatch called 'pigeon'"));
}

TEST_CASE("dispatch: ranks send what the formulas say", "[experts]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {2, 4}) {
      CAPTURE(transport, ranks);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"ep"});
            const MixSizes sizes{.tokens = {8, 8}, .dim = 16, .experts = 8, .k = 2};
            const auto c = even_case(sizes);
            const int64_t tokens = 64 / ranks;
            const expert::DispatchShape shape{.ranks = ranks, .tokens = tokens, .dim = 16, .k = 2, .experts = 8, .element_size = 8};
            const auto rows_sent = [&](const char* dispatch) {
              CommDebugMode counted;
              on_mesh(c, mesh, {shard(0)}, {shard(0)}, {.dispatch = dispatch});
              const auto all = static_cast<double>(counted.bytes(comm::Collective::all_to_all));
              return std::pair(all * (ranks - 1) / ranks, bytes_of_rows(counted, ranks));
            };
            const auto [travelled, rest] = rows_sent("alltoall");
            require(travelled == 2 * expert::bytes_sent("alltoall", shape), "test", "alltoall sent {} bytes; expected {}", travelled,
                    2 * expert::bytes_sent("alltoall", shape));
            const auto [none, gathered] = rows_sent("allgather");
            require(none == 0 && gathered >= 2 * expert::bytes_sent("allgather", shape), "test", "allgather sent {} bytes", gathered);
          },
          transport));
    }
  }
}

TEST_CASE("dispatch: a token that needs one rank twice goes there once", "[experts]") {
  for (const std::string transport : {"threads", "shm"}) {
    REQUIRE_NOTHROW(on_ranks(
        2,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
          auto c = mix_case({.tokens = {4, 4}, .dim = 64, .experts = 8, .k = 4});
          {
            const NoSpmd plain;  // all four experts of a token lie on one rank
            c.chosen = (torch::arange(16).remainder(2).mul(4).unsqueeze(1) + torch::arange(4)).view({4, 4, 4});
          }
          const auto expected = one_device(c);
          const auto bytes = [&](const char* dispatch) {
            CommDebugMode counted;
            check_same(on_mesh(c, mesh, {shard(0)}, {shard(0)}, {.dispatch = dispatch}), expected, 1e-13, dispatch);
            return static_cast<double>(counted.bytes(comm::Collective::all_to_all));
          };
          const auto all = bytes("alltoall"), once = bytes("deduplicated");
          require(once < 0.35 * all, "test", "sent {} bytes of {}", once, all);
        },
        transport));
  }
}

TEST_CASE("dispatch: where experts choose the automatic way reckons with the choices that there are", "[experts]") {
  for (const std::string transport : {"threads", "shm"}) {
    REQUIRE_NOTHROW(on_ranks(
        4,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {4}, {"ep"});
          // With a choice for each of the four experts of a token, an all_gather would send as much in fewer calls.
          set_comm_cost("ep", {.latency = 1e-9, .bandwidth = 1e9, .copy_bandwidth = 1e12});
          const Spmd spmd(mesh);
          nn::MoE layer(nn::MoEOptions{.dim = 16, .hidden = 8, .experts = 4, .router = {.top_k = 1, .choose_by = "experts"}});
          expert_parallel(*layer, mesh, {.dispatch = "automatic"});
          const auto x = distribute_tensor(torch::randn({32, 16}), mesh, {shard(0)});
          const auto bytes_of = [&](const std::string& dispatch, comm::Collective kind) {
            layer->experts->mix.dispatch = dispatch;
            CommDebugMode counted;
            layer->forward(x);
            return counted.bytes(kind);
          };
          const auto travelled = bytes_of("alltoall", comm::Collective::all_to_all);
          require(travelled > 0, "test", "nothing travelled");
          require(bytes_of("automatic", comm::Collective::all_to_all) == travelled, "test", "the automatic way was another one");
          require(bytes_of("allgather", comm::Collective::all_to_all) == 0, "test", "allgather sent by all_to_all");
          layer->experts->mix.mean_choices = 0;
          require(bytes_of("automatic", comm::Collective::all_to_all) == 0, "test", "with four choices a token an all_gather costs less");
        },
        transport));
  }
}

TEST_CASE("dispatch: what does not fit is refused in words", "[experts]") {
  const auto c = mix_case();
  refuses("the tokens do not fit", [&] { mix_experts(c.x, c.chosen.narrow(0, 0, 2), c.weights, c.experts()); });
  refuses("the weights do not fit together", [&] { mix_experts(c.x, c.chosen, c.weights, {c.w1, c.w1, c.w3}); });
  refuses("experts are numbered by int64", [&] { mix_experts(c.x, c.chosen.to(torch::kInt), c.weights, c.experts()); });
  refuses("an expert that there is not", [&] { mix_experts(c.x, c.chosen + 5, c.weights, c.experts()); });
  refuses("an expert that there is not", [&] { mix_experts(c.x, c.chosen - 3, c.weights, c.experts()); });
  refuses("no way to dispatch called 'pigeon'", [&] { mix_experts(c.x, c.chosen, c.weights, c.experts(), {.dispatch = "pigeon"}); });
  auto bad = c.weights.detach().clone();
  bad[0][0][0] = std::nan("");
  refuses("layers.3: the routing is not finite", [&] { mix_experts(c.x, c.chosen, bad, c.experts(), {.layer = "layers.3"}); });
  REQUIRE_NOTHROW(mix_experts(c.x, c.chosen, bad, c.experts(), {.error_if_nonfinite = false}));
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
    const auto given = mix_case();
    refuses("weights are cut along their experts", [&] { on_mesh(given, mesh, {shard(0)}, {shard(2)}); });
    for (const auto* dispatch : {"alltoall", "deduplicated", "allgather"}) {
      auto one = given;
      one.weights = given.weights.detach().clone();
      one.weights[3][0][0] = std::nan("");  // of rank 1
      refuses("the routing is not finite", [&] { on_mesh(one, mesh, {shard(0)}, {shard(0)}, {.dispatch = dispatch}); });
    }
  }));
}

}  // namespace dtensor::test::experts
