// The algebra of cuts under reshapes, against the definition: every rank must hold the same elements, in the same order.
#include "catch.hpp"

#include "ops/view_reshape.hpp"

#include <c10/util/accumulate.h>
#include <range/v3/numeric/iota.hpp>

#include <algorithm>
#include <numeric>

using namespace dtensor;
using rules::Reshape;

namespace {

using Shape = std::vector<int64_t>;

int64_t product(c10::IntArrayRef sizes) { return c10::multiply_integers(sizes); }

// A rank's shard: the global numbers of its elements in row-major order of its local shape.
struct Part {
  Shape sizes;
  std::vector<int64_t> elements;
};

Part whole(const Shape& sizes) {
  Part part{sizes, std::vector<int64_t>(product(sizes))};
  ranges::iota(part.elements, 0);
  return part;
}

Part take(const Part& part, const Placement& p, int64_t parts, int64_t index) {
  if (!p.is_shard()) return part;
  const c10::IntArrayRef sizes(part.sizes);
  const int64_t length = sizes[p.dim], outer = product(sizes.slice(0, p.dim)), inner = product(sizes.slice(p.dim + 1));
  Part result{part.sizes, {}};
  result.sizes[p.dim] = cut_length(length, p, parts, index);
  for (int64_t o = 0; o < outer; ++o) {
    for (const auto& interval : cut(length, p, parts, index)) {
      const auto first = part.elements.begin() + (o * length + interval.begin) * inner;
      result.elements.insert(result.elements.end(), first, first + interval.length() * inner);
    }
  }
  return result;
}

// All ranks of a mesh, in order.
std::vector<Part> spread(const Shape& sizes, PlacementsRef placements, const Shape& mesh) {
  std::vector<Part> parts{whole(sizes)};
  for (size_t m = 0; m < placements.size(); ++m) {
    std::vector<Part> next;
    for (const auto& part : parts) {
      for (int64_t i = 0; i < mesh[m]; ++i) next.push_back(take(part, placements[m], mesh[m], i));
    }
    parts = std::move(next);
  }
  return parts;
}

bool same(const std::vector<Part>& a, const std::vector<Part>& b) {
  return std::ranges::equal(a, b, [](const Part& x, const Part& y) { return x.elements == y.elements; });
}

// Every Shard that fits all of the parts.
std::vector<Placement> shards(const std::vector<Part>& parts) {
  std::vector<Placement> result;
  for (size_t d = 0; d < parts[0].sizes.size(); ++d) {
    int64_t common = 0;
    for (const auto& part : parts) common = std::gcd(common, part.sizes[d]);
    for (int64_t split = 1; split <= common; ++split) {
      for (int64_t unit = 1; split * unit <= common; ++unit) {
        if (common % (split * unit) == 0) result.push_back(strided_shard(static_cast<int64_t>(d), split, unit));
      }
    }
  }
  return result;
}

const std::vector<std::pair<Shape, Shape>> kReshapes{
    {{4, 6}, {24}},        {{24}, {4, 6}},        {{24}, {2, 3, 4}},    {{2, 3, 4}, {24}},    {{3, 4}, {12}},
    {{12}, {3, 4}},        {{5, 4}, {20}},        {{20}, {5, 4}},       {{2, 3, 4}, {6, 4}},  {{2, 3, 4}, {2, 12}},
    {{2, 12}, {2, 3, 4}},  {{6, 4}, {4, 6}},      {{6, 4}, {2, 3, 4}},  {{4, 1, 3}, {4, 3}},  {{4, 3}, {1, 4, 1, 3, 1}},
    {{1, 6}, {6}},         {{6}, {6, 1}},         {{6}, {1, 6}},        {{7}, {7, 1}},        {{1}, {1, 1}},
    {{2, 4, 6}, {8, 2, 3}}, {{8, 2, 3}, {2, 4, 6}}, {{3, 5, 2}, {15, 2}}, {{15, 2}, {3, 5, 2}}, {{4, 4, 2}, {4, 4, 2}},
    {{16}, {16}},          {{2, 2, 2, 2}, {4, 4}}, {{4, 4}, {2, 2, 2, 2}}, {{1, 1, 1}, {1}},     {{9, 2}, {3, 6}},
};

}  // namespace

TEST_CASE("a cut carried through a reshape holds the same elements and is found whenever it exists", "[ops][view][reshape]") {
  int carried = 0, inexpressible = 0;
  for (const auto& [in, out] : kReshapes) {
    const Reshape reshape(in, out);
    for (const int64_t parts : {1, 2, 3, 4, 5}) {
      for (const auto& p : shards({whole(in)})) {
        const auto expected = spread(in, p, {parts});
        const auto next = reshape.forward(p, parts);
        CAPTURE(in, out, parts, p.str(), next ? next->str() : "none");
        if (next) {
          ++carried;
          REQUIRE(same(expected, spread(out, *next, {parts})));
          continue;
        }
        if (expected[0].elements.size() == whole(in).elements.size()) continue;  // all on one rank: has many names
        ++inexpressible;
        for (const auto& other : shards({whole(out)})) {
          CAPTURE(other.str());
          REQUIRE_FALSE(same(expected, spread(out, other, {parts})));
        }
      }
      for (const auto& p : shards({whole(out)})) {
        if (const auto back = reshape.backward(p, parts)) REQUIRE(same(spread(in, *back, {parts}), spread(out, p, {parts})));
      }
    }
  }
  CHECK(carried > 500);
  CHECK(inexpressible > 100);
}

TEST_CASE("two cuts of one reshape nest", "[ops][view][reshape]") {
  int carried = 0;
  for (const auto& [in, out] : kReshapes) {
    for (const auto& mesh : {Shape{2, 2}, Shape{3, 2}, Shape{2, 3}, Shape{1, 2}, Shape{4, 2}}) {
      for (const auto& first : shards({whole(in)})) {
        Reshape reshape(in, out);
        const auto first_out = reshape.forward(first, mesh[0]);
        if (!first_out) continue;
        reshape.apply(first, *first_out, mesh[0]);
        for (const auto& second : shards(spread(in, first, mesh))) {
          const auto second_out = reshape.forward(second, mesh[1]);
          if (!second_out) continue;
          ++carried;
          CAPTURE(in, out, mesh, first.str(), second.str(), first_out->str(), second_out->str());
          REQUIRE(same(spread(in, Placements{first, second}, mesh), spread(out, Placements{*first_out, *second_out}, mesh)));
        }
      }
    }
  }
  CHECK(carried > 1000);
}

TEST_CASE("the cuts that training needs have their plain names", "[ops][view][reshape]") {
  const int64_t batch = 4, sequence = 6, heads = 4, width = 3;
  Reshape flatten(Shape{batch, sequence, heads * width}, Shape{batch * sequence, heads * width});
  CHECK(flatten.forward(shard(0), 2) == shard(0));
  CHECK(flatten.forward(shard(1), 2) == strided_shard(0, batch));
  CHECK(flatten.forward(shard(2), 2) == shard(1));
  flatten.apply(shard(0), shard(0), 2);
  CHECK(flatten.forward(shard(1), 3) == strided_shard(0, batch / 2));

  const Reshape into_heads(Shape{batch, sequence, heads * width}, Shape{batch, sequence, heads, width});
  CHECK(into_heads.forward(shard(2), 4) == shard(2));
  CHECK_FALSE(into_heads.forward(shard(2), 3).has_value());

  const Reshape uneven(Shape{3, 4}, Shape{12});
  CHECK(uneven.forward(shard(0), 2) == strided_shard(0, 1, 4));
  CHECK(uneven.backward(strided_shard(0, 1, 4), 2) == shard(0));
}
