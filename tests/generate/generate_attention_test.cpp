// Attention over pages against the formula, and that a row does not depend on the others.
#include "tests/support/core_support.hpp"
#include "tests/support/refuses.hpp"
#include "tests/support/sanitizers.hpp"

#include <dtensor/generate/paged_attention.hpp>

#include <torch/torch.h>

#include <random>

using namespace dtensor;
using namespace dtensor::test;
using generate::LayerShape;
using generate::Pages;
using generate::RowSpan;

namespace {

// A sequence with pages in a random order.
struct Paged {
  Paged(const LayerShape& shape, int64_t length, uint64_t seed) : pages(shape, length / 16 + 3) {
    for (generate::Block block = 0; block < length / 16 + 3; ++block) table.push_back(block);
    std::shuffle(table.begin(), table.end(), std::mt19937_64(seed));
    pages.keys().fill_(std::nan(""));  // what nobody wrote must not be read
    pages.values().fill_(std::nan(""));
  }
  Pages pages;
  std::vector<generate::Block> table;
};

struct Random {
  Random(const LayerShape& shape, int64_t heads, int64_t length) {
    torch::manual_seed(5);
    q = torch::randn({length, heads, shape.dim}, at::kDouble).to(shape.dtype);
    k = torch::randn({length, shape.key_heads, shape.dim}, at::kDouble).to(shape.dtype);
    v = torch::randn({length, shape.key_heads, shape.value_dim}, at::kDouble).to(shape.dtype);
  }
  at::Tensor q, k, v;  // [length, heads, dim]
};

// By the formula, in float64. `seen` [rows, rows].
at::Tensor by_formula(const Random& x, const at::Tensor& seen, double scale) {
  const auto group = x.q.size(1) / x.k.size(1);
  const auto heads = [&](const at::Tensor& y) {
    return y.to(at::kDouble).repeat_interleave(y.size(1) == x.q.size(1) ? 1 : group, 1).transpose(0, 1);
  };
  const auto scores = torch::matmul(heads(x.q), heads(x.k).transpose(1, 2)) * scale;
  return torch::matmul(scores.masked_fill(seen.logical_not(), -1e300).softmax(-1), heads(x.v)).transpose(0, 1);
}

at::Tensor causal(int64_t rows) { return torch::ones({rows, rows}, at::kBool).tril(); }

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

}  // namespace

TEST_CASE("generate attention: equals the formula", "[generate]") {
  struct Shape {
    int64_t heads, key_heads, dim, value_dim, length;
  };
  for (const auto& s :
       {Shape{4, 2, 64, 64, 70}, Shape{3, 3, 8, 8, 33}, Shape{8, 1, 6, 20, 50}, Shape{2, 1, 80, 80, 17}, Shape{1, 1, 128, 128, 200}}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      CAPTURE(s.heads, s.dim, s.length, c10::toString(dtype));
      const LayerShape shape{s.key_heads, s.dim, s.value_dim, dtype};
      const Random x(shape, s.heads, s.length);
      const Paged paged(shape, s.length, 3);
      const std::vector<RowSpan> all{{0, s.length, 0, paged.table.data(), nullptr}};
      paged.pages.write(x.k, x.v, all);
      const auto y = paged.pages.attend(x.q, all, 0.3);
      // A score of up to 16 is rounded by 1e-6; a sanitizer's build also rounds each product of it by itself.
      const auto bound = dtype == at::kDouble ? 1e-14 : dtype == at::kBFloat16 ? 2e-2 : kSanitized ? 4e-6 : 2e-6;
      CHECK(y.scalar_type() == dtype);
      CHECK(largest_difference(y, by_formula(x, causal(s.length), 0.3)) < bound);
    }
  }
}

TEST_CASE("generate attention: a row has the same bits in any chunk and beside any other", "[generate]") {
  const int64_t length = 75;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const LayerShape shape{2, 24, 24, dtype};
    const Random x(shape, 6, length);
    const Paged whole(shape, length, 1), pieces(shape, length, 2), other(shape, length, 4);
    const std::vector<RowSpan> all{{0, length, 0, whole.table.data(), nullptr}};
    whole.pages.write(x.k, x.v, all);
    const auto expected = whole.pages.attend(x.q, all, 0.2);
    for (const int64_t step : {1, 7, 32}) {
      std::vector<at::Tensor> rows;
      for (int64_t begin = 0; begin < length; begin += step) {
        const auto end = std::min(begin + step, length);
        const std::vector<RowSpan> spans{{0, end - begin, begin, pieces.table.data(), nullptr}};
        pieces.pages.write(x.k.narrow(0, begin, end - begin), x.v.narrow(0, begin, end - begin), spans);
        rows.push_back(pieces.pages.attend(x.q.narrow(0, begin, end - begin), spans, 0.2));
      }
      CHECK(torch::cat(rows).equal(expected));
    }
    // Beside another sequence, and rows of none.
    const Pages both(shape, 20);
    std::vector<generate::Block> one{9, 3, 7, 1, 15}, two{2, 4, 6};
    const auto doubled = [&](const at::Tensor& y) { return torch::cat({y.narrow(0, 0, 40), y, y.narrow(0, 0, 3)}); };
    const std::vector<RowSpan> spans{{0, 40, 0, two.data(), nullptr}, {40, 40 + length, 0, one.data(), nullptr}};
    both.write(doubled(x.k), doubled(x.v), spans);
    const auto y = both.attend(doubled(x.q), spans, 0.2);
    CHECK(y.narrow(0, 40, length).equal(expected));
    CHECK(y.narrow(0, 0, 40).equal(expected.narrow(0, 0, 40)));
    CHECK(y.narrow(0, 40 + length, 3).eq(0).all().item<bool>());
  }
}

TEST_CASE("generate attention: views of any strides", "[generate]") {
  const LayerShape shape{2, 16, 16, at::kFloat};
  const Random x(shape, 4, 20);
  const Paged paged(shape, 20, 3);
  const std::vector<RowSpan> all{{0, 20, 0, paged.table.data(), nullptr}};
  const auto turned = [](const at::Tensor& y) { return y.transpose(0, 1).contiguous().transpose(0, 1); };
  const auto odd = [](const at::Tensor& y) { return y.transpose(1, 2).contiguous().transpose(1, 2); };
  paged.pages.write(turned(x.k), odd(x.v), all);
  CHECK(largest_difference(paged.pages.attend(odd(x.q), all, 0.3), by_formula(x, causal(20), 0.3)) < 2e-6);
  CHECK(largest_difference(paged.pages.attend(turned(x.q), all, 0.3), by_formula(x, causal(20), 0.3)) < 2e-6);
}

TEST_CASE("generate attention: rows of a tree see their ancestors", "[generate]") {
  for (const int64_t before : {0, 5, 16, 29, 40}) {
    const int64_t nodes = 64, length = before + nodes;
    const LayerShape shape{1, 8, 8, at::kDouble};
    const Random x(shape, 2, length);
    const Paged paged(shape, length, 3);
    std::mt19937_64 random(static_cast<uint64_t>(before));
    std::vector<uint64_t> sees(nodes);
    auto seen = causal(length);
    for (int64_t i = 0; i < nodes; ++i) {
      const auto parent = static_cast<int64_t>(random() % static_cast<uint64_t>(i + 1)) - 1;
      sees[i] = (parent < 0 ? 0 : sees[parent]) | uint64_t{1} << i;
      for (int64_t j = 0; j < nodes; ++j) seen[before + i][before + j] = (sees[i] >> j & 1) != 0;
    }
    std::vector<RowSpan> spans{{0, before, 0, paged.table.data(), nullptr}, {before, length, before, paged.table.data(), sees.data()}};
    paged.pages.write(x.k, x.v, spans);
    CHECK(largest_difference(paged.pages.attend(x.q, spans, 0.5), by_formula(x, seen, 0.5)) < 1e-14);
  }
}

TEST_CASE("generate attention: moved rows and copied blocks", "[generate]") {
  const LayerShape shape{2, 8, 8, at::kFloat};
  const Random x(shape, 2, 34);
  const Paged paged(shape, 48, 3);
  const std::vector<RowSpan> all{{0, 34, 0, paged.table.data(), nullptr}};
  paged.pages.write(x.k, x.v, all);
  const auto expected = paged.pages.attend(x.q, all, 0.3);
  paged.pages.copy_block(paged.table[1], paged.table[4]);
  auto table = paged.table;
  std::swap(table[1], table[4]);
  paged.pages.keys()[table[4]].fill_(std::nan(""));
  const std::vector<RowSpan> moved{{0, 34, 0, table.data(), nullptr}};
  CHECK(paged.pages.attend(x.q, moved, 0.3).equal(expected));
  // Row 33 becomes row 20: the query at 20 sees what that at 33 saw there.
  paged.pages.copy_place(table.data(), 33, 20);
  auto y = x;
  y.k = x.k.clone(), y.v = x.v.clone();
  y.k[20] = x.k[33], y.v[20] = x.v[33];
  CHECK(largest_difference(paged.pages.attend(x.q, moved, 0.3), by_formula(y, causal(34), 0.3)) < 2e-6);
}

TEST_CASE("generate attention: refuses what does not fit", "[generate]") {
  const LayerShape shape{2, 8, 8, at::kFloat};
  const Pages pages(shape, 2);
  const std::vector<generate::Block> table{0, 1};
  const std::vector<RowSpan> all{{0, 3, 0, table.data(), nullptr}};
  const auto x = [](int64_t heads, at::ScalarType dtype) { return torch::zeros({3, heads, 8}, dtype); };
  refuses("the cache was made for 2 heads of 8", [&] { pages.write(x(4, at::kFloat), x(4, at::kFloat), all); });
  refuses("Double", [&] { pages.write(x(2, at::kDouble), x(2, at::kDouble), all); });
  refuses("a multiple of 2 heads", [&] { pages.attend(x(3, at::kFloat), all, 1); });
  refuses("float32, bfloat16 or float64", [&] { Pages(LayerShape{2, 8, 8, at::kHalf}, 2).write(x(2, at::kHalf), x(2, at::kHalf), all); });
  CHECK(LayerShape{2, 64, 64, at::kFloat}.bytes_of_block() == 2 * 16 * 128 * 4);
  CHECK(LayerShape{2, 8, 8, at::kDouble}.bytes_of_block() == static_cast<int64_t>(pages.keys().nbytes() + pages.values().nbytes()));
}
