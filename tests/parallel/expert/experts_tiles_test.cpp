// Tokens in tiles: the numbers of one device, and computing while others travel.
#include "tests/support/experts_support.hpp"
#include "tests/support/refuses.hpp"
#include "tests/support/slow_link.hpp"

#include <numeric>

namespace dtensor::test::experts {

TEST_CASE("tiles: they part each rank's tokens", "[experts]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const expert::Group group{init_device_mesh(c10::kCPU, {2}, {"ep"}), {0, 2, 4}, {{{0, 4}, {10, 13}}, {{4, 5}}}};
    int64_t all = 0;
    for (int64_t i = 0; i < 3; ++i) {
      const auto tile = expert::tile_of(group, i, 3);
      for (const auto& runs : tile.tokens) {
        for (const auto& run : runs) all += run.length();
      }
    }
    require(all == 8, "test", "tiles have {} tokens", all);
    const auto second = expert::tile_of(group, 1, 3);  // tokens 2 to 3 of seven
    require(second.tokens[0].size() == 1 && second.tokens[0][0].begin == 2 && second.tokens[0][0].end == 4, "test", "tile 1 is wrong");
    const auto third = expert::tile_of(group, 2, 3);
    require(third.tokens[0].size() == 1 && third.tokens[0][0].begin == 10 && third.tokens[1].size() == 1, "test", "tile 2 is wrong");
  }));
}

TEST_CASE("tiles: mixtures have the numbers of one device", "[experts]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {2, 4}) {
      CAPTURE(transport, ranks);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"ep"});
            const auto c = mix_case({.tokens = {4, 6}, .experts = 8});
            const auto expected = one_device(c);
            auto uneven = c;
            uneven.chosen = c.chosen.clone();
            uneven.chosen.select(-1, 0).fill_(5), uneven.chosen.select(-1, 1).fill_(-1);
            const auto few = mix_case({.tokens = {1, 2}, .experts = 8});
            auto bad = c;
            bad.weights = c.weights.detach().clone();
            bad.weights[3][5][0] = std::nan("");
            for (const std::string way : {"alltoall", "deduplicated"}) {
              MixOptions options{.dispatch = way};
              const auto check = [&](const MixCase& given, int64_t cut, int64_t tiles, const std::string& what) {
                options.tiles = tiles;
                check_same(on_mesh(given, mesh, {shard(cut)}, {shard(0)}, options), one_device(given), 1e-13, way + " " + what);
              };
              for (const int64_t tiles : {2, 3, 16}) check(c, 0, tiles, "along the batch"), check(c, 1, tiles, "along positions");
              check(uneven, 0, 3, "all to one expert");
              check(few, 0, 4, "ranks without tokens");
              refuses("the routing is not finite", [&] { on_mesh(bad, mesh, {shard(0)}, {shard(0)}, options); });
              options.rows = options.results = "bfloat16";
              check_same(on_mesh(c, mesh, {shard(0)}, {shard(0)}, options), expected, 0.1, "bfloat16");
            }
          },
          transport));
    }
  }
  const auto c = mix_case();
  refuses("got 0 tiles", [&] { mix_experts(c.x, c.chosen, c.weights, c.experts(), {.tiles = 0}); });
  refuses("got 2 tiles and allgather", [&] { mix_experts(c.x, c.chosen, c.weights, c.experts(), {.dispatch = "allgather", .tiles = 2}); });
}

TEST_CASE("tiles: rows that are put have the bits of rows that are sent", "[experts][symmetric]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      CAPTURE(transport, ranks);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"ep"});
            const auto check = [&](const MixCase& c, int64_t cut, MixOptions options, const std::string& what) {
              const auto sent = on_mesh(c, mesh, {shard(cut)}, {shard(0)}, options);
              options.put = true;
              check_same(on_mesh(c, mesh, {shard(cut)}, {shard(0)}, options), sent, 0, what);
            };
            const auto c = mix_case({.tokens = {4, 6}, .experts = 8});
            for (const int64_t tiles : {1, 3, 16}) {
              check(c, 0, {.tiles = tiles}, "along the batch");
              check(c, 1, {.tiles = tiles}, "along positions");
              check(c, 0, {.rows = "bfloat16", .results = "blocks8", .tiles = tiles}, "in fewer bits");
            }
            auto uneven = c;
            uneven.chosen = c.chosen.clone();
            uneven.chosen.select(-1, 0).fill_(5), uneven.chosen.select(-1, 1).fill_(-1);
            check(uneven, 0, {.tiles = 3}, "all to one expert");
            check(mix_case({.tokens = {1, 2}, .experts = 8}), 0, {.tiles = 4}, "ranks without tokens");
            for (int64_t i = 0; i < 24; ++i) {  // in turn, in memory that is used again and grows
              const auto some = mix_case({.tokens = {1 + i * 5 % 7, 4 + i}, .experts = 8}, i % 2 == 0, i % 3 ? at::kFloat : at::kDouble, 3);
              check(some, i % 2, {.tiles = 1 + i % 4}, "pass " + std::to_string(i));
            }
          },
          transport));
    }
  }
  const auto c = mix_case();
  refuses("got deduplicated; hint: leave .put out",
          [&] { mix_experts(c.x, c.chosen, c.weights, c.experts(), {.dispatch = "deduplicated", .put = true}); });
}

TEST_CASE("tiles: most of a slow link's time is hidden", "[experts]") {
  // Computing takes longer than the way, also on a fast machine: otherwise there is not enough to hide it behind.
  const auto c = mix_case({.tokens = {64, 8}, .dim = 64, .hidden = 8192, .experts = 4}, true, at::kFloat);
  for (const std::string way : {"alltoall", "deduplicated"}) {
    Waits one, ten;
    REQUIRE_NOTHROW(on_slow_links(2, 40e-9, [&](World& world, Link& link) {
      const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
      one.take(world, link, [&] { on_mesh(c, mesh, {shard(0)}, {shard(0)}, {.dispatch = way}); });
      ten.take(world, link, [&] { on_mesh(c, mesh, {shard(0)}, {shard(0)}, {.dispatch = way, .tiles = 10}); });
    }));
    const auto sum = [](const std::vector<double>& waits) { return std::accumulate(waits.begin(), waits.end(), 0.0); };
    const auto whole = sum(one.median()), tiled = sum(ten.median());
    CAPTURE(way, whole, tiled);
    REQUIRE(whole > 0.01);  // four times about 512 rows of 256 bytes take 21 ms, and fewer tokens less
    REQUIRE(tiled < 0.2 * whole);
  }
}

}  // namespace dtensor::test::experts
