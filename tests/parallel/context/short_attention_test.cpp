// The kernel for short sequences in one row gives what tiles give.
#include "tests/support/rl_support.hpp"

#include <dtensor/parallel/context/block_attention.hpp>

#include <random>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::context;

namespace {

struct ShortCase {
  AttentionMask mask;
  std::vector<PackedSequence> sequences;
  int64_t heads, key_heads, dim;
};

at::Tensor short_input(const ShortCase& c, int64_t batch, int64_t heads, int seed, at::ScalarType dtype) {
  return rl_numbers({batch, c.sequences[0].length(), heads, c.dim}, seed).to(dtype).transpose(1, 2);  // as layers give it
}

void require_close(const at::Tensor& got, const at::Tensor& expected, double most, const char* what) {
  const auto shown = expected.isfinite();
  require(got.isfinite().equal(shown), "test", "{} has other infinities", what);
  const auto apart = (got - expected).masked_fill(shown.logical_not(), 0).abs().max().item<double>();
  require(apart <= most, "test", "{} is {} apart", what, apart);
}

void check_short(const ShortCase& c, int64_t batch, at::ScalarType dtype, double most) {
  Positions rows(c.sequences[0].length());
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<std::unique_ptr<MaskInPieces>> masks;
  AttentionCall call{.scale = 0.4};
  for (const auto& sequence : c.sequences) {
    masks.push_back(std::make_unique<MaskInPieces>(BlockMask(c.mask, sequence, rows, rows)));
    call.masks.push_back(masks.back().get());
  }
  const auto q = short_input(c, batch, c.heads, 1, dtype), k = short_input(c, batch, c.key_heads, 2, dtype),
             v = short_input(c, batch, c.key_heads, 3, dtype), grad = short_input(c, batch, c.heads, 4, dtype);
  require(context::detail::suits_short(q, call), "test", "the kernel is not chosen");
  const auto expected = context::detail::tiled_attention(q, k, v, call), got = block_attention(q, k, v, call);
  require_close(got.out, expected.out, most, "the output");
  require_close(got.lse, expected.lse, most, "the log-sum-exp");
  const OutputGradient of{grad, expected.lse, {}, expected.out};
  const BlockGradients tiled{at::ones(q.sizes(), q.options()), at::ones(k.sizes(), q.options()), at::ones(k.sizes(), q.options())};
  context::detail::add_tiled_gradients(tiled, q, k, v, of, call);
  BlockGradients own{at::ones(q.sizes(), q.options()), {}, {}};  // it adds
  add_block_gradients(own, q, k, v, of, call);
  require_close(own.dq, tiled.dq, 10 * most, "dq");
  require_close(own.dk, tiled.dk - 1, 10 * most, "dk");
  require_close(own.dv, tiled.dv - 1, 10 * most, "dv");
}

}  // namespace

TEST_CASE("short attention: pairs give what tiles give", "[context]") {
  std::mt19937 random(5);
  const auto draw = [&](int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(random); };
  for (int i = 0; i < 12; ++i) {
    std::vector<int64_t> lengths;
    std::vector<Interval> runs;
    for (int64_t d = 0, at = 0; d < 40; ++d) {
      lengths.push_back(draw(1, 12) + (d == 0) * 120);  // of which 128 are enough
      runs.push_back(d < 3 ? Interval{0, 0} : Interval{at / 2, at / 2 + draw(0, 6)});
      at += lengths.back();
    }
    std::vector<PackedSequence> sequences{PackedSequence(lengths)};
    const bool holes = i % 3 == 2;  // some queries see no key
    const auto mask = holes ? AttentionMask::from([](int64_t q, int64_t k, int64_t a, int64_t b) {
      return a == b && k <= q && q % 7 != 3 && (q * 5 + k) % 3 > 0;
    })
                            : AttentionMask::shared_runs(runs);
    if (i % 4 == 3 && holes) sequences.emplace_back(std::vector<int64_t>(lengths.rbegin(), lengths.rend()));
    const auto key_heads = draw(1, 3);
    const ShortCase c{mask, sequences, key_heads * draw(1, 3), key_heads, std::array<int64_t, 4>{16, 5, 33, 8}[i % 4]};
    CAPTURE(i, c.heads, key_heads, c.dim, mask.name());
    REQUIRE_NOTHROW(check_short(c, 2, at::kDouble, 1e-13));
    REQUIRE_NOTHROW(check_short(c, 2, at::kFloat, 1e-5));
  }
}

TEST_CASE("short attention: long rows and half types are left to tiles", "[context]") {
  Positions rows(256);
  std::iota(rows.begin(), rows.end(), 0);
  const MaskInPieces window(BlockMask(AttentionMask::causal_sliding_window(9), PackedSequence(256), rows, rows)),
      wide(BlockMask(AttentionMask::causal_sliding_window(99), PackedSequence(256), rows, rows));
  const auto x = at::zeros({1, 2, 256, 8});
  CHECK(context::detail::suits_short(x, {.masks = {&window}}));
  CHECK_FALSE(context::detail::suits_short(x, {.masks = {&wide}}));
  CHECK_FALSE(context::detail::suits_short(x, {.masks = {&window, &wide}}));
  CHECK_FALSE(context::detail::suits_short(x.to(at::kBFloat16), {.masks = {&window}}));
  CHECK_FALSE(context::detail::suits_short(x.narrow(2, 0, 64), {.masks = {&window}}));
  const AttentionDropout dropout{.probability = 0.5};
  CHECK_FALSE(context::detail::suits_short(x, {.masks = {&window}, .dropout = &dropout}));
}
