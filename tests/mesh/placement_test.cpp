// Which part of a dimension a placement gives to each rank.
#include "catch.hpp"
#include "tests/support/core_support.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/placement.hpp>

#include <vector>

using namespace dtensor;
using namespace dtensor::test;

namespace {

std::vector<int64_t> indices(int64_t length, const Placement& p, int64_t parts, int64_t index) {
  std::vector<int64_t> result;
  for (const auto& part : cut(length, p, parts, index)) {
    for (int64_t i = part.begin; i < part.end; ++i) result.push_back(i);
  }
  return result;
}

using List = std::vector<int64_t>;

}  // namespace

TEST_CASE("a shard is cut as torch.chunk does", "[placement]") {
  REQUIRE(indices(10, shard(0), 4, 0) == List{0, 1, 2});
  REQUIRE(indices(10, shard(0), 4, 2) == List{6, 7, 8});
  REQUIRE(indices(10, shard(0), 4, 3) == List{9});
  REQUIRE(indices(5, shard(0), 4, 2) == List{4});
  REQUIRE(indices(5, shard(0), 4, 3).empty());
  REQUIRE(indices(0, shard(0), 4, 0).empty());
  REQUIRE(indices(1, shard(0), 4, 1).empty());
  REQUIRE(cut_length(10, shard(0), 4, 3) == 1);
}

TEST_CASE("a split cuts the inner part of every block and a unit keeps blocks whole", "[placement]") {
  REQUIRE(indices(12, strided_shard(0, 3), 2, 0) == List{0, 1, 4, 5, 8, 9});
  REQUIRE(indices(12, strided_shard(0, 3), 2, 1) == List{2, 3, 6, 7, 10, 11});
  REQUIRE(indices(9, strided_shard(0, 3), 2, 1) == List{2, 5, 8});
  REQUIRE(indices(12, strided_shard(0, 1, 4), 2, 0) == List{0, 1, 2, 3, 4, 5, 6, 7});
  REQUIRE(indices(12, strided_shard(0, 1, 4), 2, 1) == List{8, 9, 10, 11});
  REQUIRE(indices(12, strided_shard(0, 2, 3), 2, 1) == List{3, 4, 5, 9, 10, 11});
  REQUIRE(cut(12, strided_shard(0, 3), 1, 0) == Intervals{{0, 12}});
}

TEST_CASE("a ragged shard is cut in the proportion of its shares", "[placement]") {
  const auto lengths = [](int64_t length, const Placement& p) {
    List result;
    const auto parts = static_cast<int64_t>(p.shares->parts().size());
    for (int64_t i = 0; i < parts; ++i) result.push_back(cut_length(length, p, parts, i));
    return result;
  };
  REQUIRE(lengths(8, ragged_shard(0, {3, 0, 1})) == List{6, 0, 2});
  REQUIRE(lengths(4, ragged_shard(0, {3, 0, 1})) == List{3, 0, 1});
  REQUIRE(lengths(7, ragged_shard(0, {1, 1, 1})) == List{2, 2, 3});  // ends at 7/3 and 14/3, rounded down
  REQUIRE(lengths(12, ragged_shard(0, {2, 1}, 4)) == List{8, 4});    // whole blocks of 4
  REQUIRE(lengths(16, ragged_shard(0, {1, 1, 1}, 4)) == List{4, 4, 8});
  REQUIRE(lengths(0, ragged_shard(0, {1, 2})) == List{0, 0});
  REQUIRE(lengths(int64_t{1} << 60, ragged_shard(0, {(int64_t{1} << 61) + 1, (int64_t{1} << 61) - 1})) ==
          List{int64_t{1} << 59, int64_t{1} << 59});
  REQUIRE(indices(8, ragged_shard(0, {3, 0, 1}), 3, 2) == List{6, 7});
  REQUIRE(indices(12, shard(0, Cut{2, 1, Shares::of({2, 1})}), 2, 1) == List{4, 5, 10, 11});  // the last third of each half
}

TEST_CASE("shares are a proportion", "[placement]") {
  REQUIRE(ragged_shard(0, {2, 4}) == ragged_shard(0, {1, 2}));
  REQUIRE(!(ragged_shard(0, {2, 1}) == ragged_shard(0, {1, 2})));
  REQUIRE(RaggedShard(1, {6, 0, 3}, 4).str() == "Ragged(1, 2:0:1, unit=4)");
  REQUIRE(ragged_shard(0, std::vector<int64_t>(20, 1)).str() == "Ragged(0, 1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:... of 20)");
  REQUIRE_THROWS_WITH(ragged_shard(0, {}), says("not all of them 0"));
  REQUIRE_THROWS_WITH(ragged_shard(0, {0, 0}), says("not all of them 0"));
  REQUIRE_THROWS_WITH(ragged_shard(0, {1, -1}), says("expected numbers of 0 or more"));
  REQUIRE_THROWS_WITH(ragged_shard(0, {std::numeric_limits<int64_t>::max(), 1}), says("at most 2^62"));
  // One order on every rank, whatever the addresses.
  REQUIRE(Cut{1, 1, Shares::of({1, 2})} < Cut{1, 1, Shares::of({1, 3})});
  REQUIRE(Cut{} < Cut{1, 1, Shares::of({1, 2})});
  REQUIRE(!(Cut{1, 1, Shares::of({1, 2})} < Cut{}));
}

TEST_CASE("the parts of a dimension cover it once", "[placement]") {
  for (int64_t length : {0, 12, 24, 60}) {
    for (const auto& p :
         {shard(0), strided_shard(0, 3), strided_shard(0, 2), strided_shard(0, 1, 4), strided_shard(0, 2, 3)}) {
      for (int64_t parts : {1, 2, 3, 4, 7}) {
        std::vector<int> seen(length);
        for (int64_t index = 0; index < parts; ++index) {
          const auto mine = indices(length, p, parts, index);
          REQUIRE(static_cast<int64_t>(mine.size()) == cut_length(length, p, parts, index));
          for (int64_t i : mine) ++seen[i];
        }
        REQUIRE(seen == std::vector<int>(length, 1));
      }
    }
  }
}

TEST_CASE("a split that does not divide is an error", "[placement]") {
  REQUIRE_THROWS_WITH(cut(10, strided_shard(0, 3), 2, 0), says("length 10"));
  REQUIRE_THROWS_AS(cut(10, strided_shard(0, 0), 2, 0), Error);
  REQUIRE_THROWS_AS(cut_length(10, strided_shard(0, 1, 4), 2, 0), Error);
}

TEST_CASE("placements print", "[placement]") {
  REQUIRE(replicate().str() == "R");
  REQUIRE(shard(1).str() == "S(1)");
  REQUIRE(strided_shard(0, 3).str() == "S(0, split=3)");
  REQUIRE(strided_shard(0, 1, 4).str() == "S(0, unit=4)");
  REQUIRE(partial().str() == "P(sum)");
  REQUIRE(partial(ReduceOp::norm2).str() == "P(norm2)");
  REQUIRE(str(Placements{shard(0), replicate()}) == "(S(0), R)");
}
