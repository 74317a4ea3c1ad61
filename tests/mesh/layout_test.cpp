// Layouts: interning, normal form, which elements each rank holds, and what bad placements say.
#include "catch.hpp"
#include "tests/support/core_support.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/layout.hpp>

#include <c10/util/accumulate.h>
#include <range/v3/action/push_back.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <set>

using namespace dtensor;
using test::Alone;
using test::says;

namespace {

LayoutPtr layout(const DeviceMesh& mesh, Placements placements, std::vector<int64_t> sizes) {
  return Layout::get(mesh, placements, sizes, at::kFloat);
}

std::vector<int64_t> elements(const std::vector<Interval>& runs) {
  std::vector<int64_t> result;
  for (const auto& run : runs) {
    for (int64_t i = run.begin; i < run.end; ++i) result.push_back(i);
  }
  return result;
}

// The same from the boxes, ascending.
std::vector<int64_t> elements(const std::vector<std::vector<Interval>>& boxes, c10::IntArrayRef sizes) {
  std::vector<int64_t> result;
  for (const auto& box : boxes) {
    std::vector<int64_t> partial{0};
    for (size_t d = 0; d < sizes.size(); ++d) {
      std::vector<int64_t> longer;
      for (int64_t prefix : partial) {
        for (int64_t i = box[d].begin; i < box[d].end; ++i) longer.push_back(prefix * sizes[d] + i);
      }
      partial = std::move(longer);
    }
    ranges::push_back(result, partial);
  }
  std::ranges::sort(result);
  return result;
}

int64_t numel(c10::IntArrayRef sizes) {
  return c10::multiply_integers(sizes);
}

}  // namespace

TEST_CASE("equal layouts are one object while somebody holds it", "[layout]") {
  Alone alone(4);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
  const auto a = layout(mesh, {shard(0), replicate()}, {8, 6});
  REQUIRE(a == layout(mesh, {shard(0), replicate()}, {8, 6}));
  REQUIRE(a == layout(mesh, {shard(-2), replicate()}, {8, 6}));
  REQUIRE(a == a->with(a->placements()));
  REQUIRE(a != layout(mesh, {shard(0), shard(1)}, {8, 6}));
  REQUIRE(a != layout(mesh, {shard(0), replicate()}, {6, 8}));
  REQUIRE(a != Layout::get(mesh, a->placements(), a->sizes(), at::kDouble));
  REQUIRE(a != Layout::get(mesh, a->placements(), a->sizes(), std::vector<int64_t>{1, 8}, at::kFloat));
  REQUIRE(a.use_count() == 1);
  REQUIRE(a->str() == "f32[8, 6] (S(0), R) on (dp=2, tp=2)");
  REQUIRE(a->strides() == c10::IntArrayRef({6, 1}));
  REQUIRE(a->local_sizes() == c10::IntArrayRef({4, 6}));
  REQUIRE_FALSE(a->is_replicated());
  REQUIRE(layout(mesh, {replicate(), replicate()}, {8, 6})->is_replicated());
  REQUIRE(layout(mesh, {replicate(), partial()}, {8, 6})->has_partial());
}

TEST_CASE("a unit without effect is dropped", "[layout]") {
  Alone alone(4);
  const auto line = init_device_mesh(c10::kCPU, {4}, {"x"});
  const auto square = init_device_mesh(c10::kCPU, {2, 2}, {"x", "y"});
  REQUIRE(layout(line, {strided_shard(0, 1, 3)}, {12}) == layout(line, {shard(0)}, {12}));
  REQUIRE(layout(line, {strided_shard(0, 1, 4)}, {12}) != layout(line, {shard(0)}, {12}));
  REQUIRE(layout(square, {strided_shard(0, 1, 3), strided_shard(0, 1, 3)}, {12}) ==
          layout(square, {shard(0), shard(0)}, {12}));
  REQUIRE(layout(square, {strided_shard(0, 1, 2), strided_shard(0, 1, 2)}, {12})->placements() ==
          PlacementsRef(Placements{strided_shard(0, 1, 1), strided_shard(0, 1, 2)}));
  REQUIRE(layout(init_device_mesh(c10::kCPU, {1, 4}), {strided_shard(0, 2, 3), replicate()}, {12})->placements()[0] ==
          strided_shard(0, 2));
}

TEST_CASE("layouts leave no trace and may outlive their world", "[layout]") {
  LayoutPtr survivor;
  {
    Alone alone(2);
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    for (int64_t n = 1; n < 1000; ++n) layout(mesh, {shard(0)}, {n});
    survivor = layout(mesh, {shard(0)}, {7});
  }
  REQUIRE(survivor->local_sizes() == c10::IntArrayRef({4}));
  REQUIRE(survivor->with({replicate()})->local_sizes() == c10::IntArrayRef({7}));
}

TEST_CASE("threads of a rank may make and drop the same layout", "[layout]") {
  Alone alone(2);
  const auto mesh = init_device_mesh(c10::kCPU, {2});
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int64_t i = 0; i < 20000; ++i) {
        const auto made = layout(mesh, {shard(0)}, {i % 3 + 1});
        if (made->local_sizes()[0] != (i % 3 + 2) / 2) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  REQUIRE(wrong == 0);
}

TEST_CASE("nested cuts: each cuts what the one before left", "[layout]") {
  Alone alone(4, 3);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"a", "b"});
  const auto nested = layout(mesh, {strided_shard(0, 3), shard(0)}, {12});
  REQUIRE(nested->intervals(0, {0, 0}) == Intervals{{0, 2}, {4, 5}});
  REQUIRE(nested->intervals(0, {0, 1}) == Intervals{{5, 6}, {8, 10}});
  REQUIRE(nested->local_sizes_before(1, {0, 0}) == Sizes{6});
  REQUIRE(nested->local_sizes() == c10::IntArrayRef({3}));
  const auto uneven = layout(mesh, {shard(0), shard(0)}, {5});
  REQUIRE(uneven->intervals(0, {0, 0}) == Intervals{{0, 2}});
  REQUIRE(uneven->intervals(0, {0, 1}) == Intervals{{2, 3}});
  REQUIRE(uneven->intervals(0, {1, 0}) == Intervals{{3, 4}});
  REQUIRE(uneven->intervals(0, {1, 1}) == Intervals{{4, 5}});
}

TEST_CASE("every element is held once per replica and runs and boxes agree", "[layout]") {
  Alone alone(6);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 3}, {"a", "b"});
  const std::vector<Placement> choices{
      replicate(), shard(0), shard(1), shard(2), strided_shard(1, 2), strided_shard(1, 2, 3), partial()};
  for (const auto& sizes : {std::vector<int64_t>{4, 12, 2}, {5, 12, 3}, {1, 36, 1}, {0, 12, 2}}) {
    for (const auto& p : choices) {
      for (const auto& q : choices) {
        const bool fits = p.is_shard(1) && q.is_shard(1) ? sizes[1] == 36 : true;
        if (!fits) continue;
        const auto made = layout(mesh, {p, q}, sizes);
        std::vector<int64_t> held(numel(sizes));
        int64_t replicas = 1;
        for (int i = 0; i < 2; ++i) replicas *= made->placements()[i].is_shard() ? 1 : mesh.size(i);
        for (int64_t rank = 0; rank < 6; ++rank) {
          const auto at = mesh.coordinate_of(rank);
          const auto runs = made->runs(at);
          const auto mine = elements(runs);
          REQUIRE(mine == elements(made->boxes(at), sizes));
          REQUIRE(static_cast<int64_t>(mine.size()) == numel(made->local_sizes_before(2, at)));
          for (size_t k = 1; k < runs.size(); ++k) REQUIRE(runs[k - 1].end < runs[k].begin);
          for (int64_t index : mine) ++held[index];
        }
        REQUIRE(held == std::vector<int64_t>(numel(sizes), replicas));
      }
    }
  }
}

TEST_CASE("a scalar has one element", "[layout]") {
  Alone alone(2);
  const auto scalar = layout(init_device_mesh(c10::kCPU, {2}), {partial()}, {});
  REQUIRE(scalar->runs({1}) == std::vector<Interval>{{0, 1}});
  REQUIRE(scalar->boxes({0}).size() == 1);
  REQUIRE(scalar->local_sizes().empty());
}

TEST_CASE("placements that do not fit say why", "[layout]") {
  Alone alone(4);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
  REQUIRE_THROWS_WITH(
      layout(mesh, {replicate(), shard(2)}, {8, 6}),
      says("S(2) does not fit a tensor of shape [8, 6] on mesh dimension \"tp\" of size 2: shard dim 2 is out of "
           "range for 2 dimensions; expected -2 to 1"));
  REQUIRE_THROWS_WITH(layout(mesh, {shard(-3), replicate()}, {8, 6}), says("shard dim -3"));
  REQUIRE_THROWS_WITH(layout(mesh, {shard(0), replicate()}, {}), says("got shard dim 0 of a single number, which has no dims to cut"));
  REQUIRE_THROWS_WITH(layout(mesh, {shard(65536), replicate()}, {4}), says("out of range for 1 dimensions"));
  REQUIRE_THROWS_WITH(layout(mesh, {shard(-65536), replicate()}, {4}), says("out of range for 1 dimensions"));
  REQUIRE_THROWS_WITH(layout(mesh, {shard(0)}, {8}), says("got 1 placements (S(0)); expected 2"));
  REQUIRE_THROWS_WITH(layout(mesh, {strided_shard(0, 3), replicate()}, {8}),
                      says("split*unit = 3 does not divide the length 8"));
  // 5 is cut into 3 and 2: the second rank's shard cannot be split in 3, and every rank must say so.
  REQUIRE_THROWS_WITH(layout(mesh, {shard(0), strided_shard(0, 3)}, {5}),
                      says("does not divide the length 2 of dim 0"));
  REQUIRE_THROWS_WITH(Layout::get(mesh, Placements{shard(0), replicate()}, {8}, {1, 1}, at::kFloat), says("2 strides"));
}

TEST_CASE("a rank outside a mesh knows its layouts", "[layout]") {
  Alone alone(4);
  const DeviceMesh elsewhere(c10::kCPU, {1, 2}, {2}, {"x"});
  const auto layout = Layout::get(elsewhere, Placements{shard(0)}, {5, 2}, at::kFloat);
  REQUIRE(layout->is_absent());
  REQUIRE(layout->boxes({1}) == std::vector<std::vector<Interval>>{{{3, 5}, {0, 2}}});
  REQUIRE(layout->local_sizes() == c10::IntArrayRef({3, 2}));  // of its first rank
  const auto here = layout->with(init_device_mesh(c10::kCPU, {4}), Placements{shard(1)});
  REQUIRE_FALSE(here->is_absent());
  REQUIRE(here->sizes() == layout->sizes());
}

TEST_CASE("elements in a row are boxes", "[layout]") {
  using Boxes = std::vector<std::vector<Interval>>;
  REQUIRE(boxes_of({4, 3}, {3, 9}) == Boxes{{{1, 3}, {0, 3}}});
  REQUIRE(boxes_of({4, 3}, {2, 7}) == Boxes{{{0, 1}, {2, 3}}, {{1, 2}, {0, 3}}, {{2, 3}, {0, 1}}});
  REQUIRE(boxes_of({4, 3}, {5, 5}).empty());
  REQUIRE(boxes_of({}, {0, 1}) == Boxes{{}});
}
