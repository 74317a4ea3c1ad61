// Which method "automatic" takes, and the pieces of a mask that libtorch's kernel is given.
#include "tests/support/core_support.hpp"

#include <dtensor/parallel/context/attention.hpp>

using namespace dtensor;
using context::AttentionCost;
using context::Positions;

namespace {

struct Setting {
  AttentionMask mask = AttentionMask::causal();
  PackedSequence sequence{4096};
  int ranks = 4;
  context::AttentionShape shape{1, 8, 8, 64, 4, 4};
  std::vector<int64_t> mesh{4};
  std::vector<CommCost> links{CommCost{}};
  double flops = 3e10;
};

// Of all methods, the one that takes least.
std::string chosen(const Setting& s) {
  const ContextPlan plan(s.mask, {s.sequence}, context::zigzag_order(s.sequence.length(), s.ranks));
  const AttentionCost cost(plan, s.shape, s.mesh, s.links, s.flops);
  return (*std::ranges::min_element(context::all_methods(), {}, [&](const auto* method) { return method->seconds(cost); }))->name();
}

// "0-3x0-3c" for a causal piece of 3 queries and 3 keys.
std::string pieces(const AttentionMask& mask, const PackedSequence& sequence, const Positions& queries, const Positions& keys) {
  std::string text;
  const auto all = context::pieces_of(context::BlockMask(mask, sequence, queries, keys), 100).value();
  for (const auto& [q, k, causal] : all) {
    text += fmt::format("{}{}-{}x{}-{}{}", text.empty() ? "" : " ", q.begin, q.end, k.begin, k.end, causal ? "c" : "");
  }
  return text;
}

}  // namespace

TEST_CASE("context choice: heads and links and masks decide on the method", "[context]") {
  Setting s;
  const CommCost slow{20e-6, 1e8, 1e10};
  s.links = {slow};
  s.flops = 1e14;  // messages decide
  CHECK(chosen(s) == "ulysses");
  s.shape.key_heads = 1;  // few keys, many queries: keys travel
  CHECK(chosen(s) == "ring");
  s.shape.heads = s.shape.key_heads = 2;  // two of four ranks would have no head
  s.flops = 1e9;
  CHECK(chosen(s) != "ulysses");
  // No query sees another rank's keys: only the ring sends nothing.
  s = Setting{AttentionMask::from([](int64_t q, int64_t k, int64_t, int64_t) { return q == k; }), PackedSequence(64)};
  CHECK(chosen(s) == "ring");
  // Two hosts with a slow link between them.
  s = Setting{};
  s.mesh = {2, 2}, s.links = {slow, CommCost{}};
  s.shape.key_heads = 2;
  s.flops = 1e13;
  const auto across = chosen(s);
  CHECK((across == "doublering" || across == "usp"));
}

TEST_CASE("context choice: masks fall into rectangles and triangles", "[context]") {
  const PackedSequence one(8), two({3, 5});
  const auto zigzag = context::zigzag_order(8, 2);  // 0 1 6 7, 2 3 4 5
  const auto causal = AttentionMask::causal();
  CHECK(pieces(causal, one, zigzag[0], zigzag[0]) == "0-4x0-4c");
  CHECK(pieces(causal, one, zigzag[0], zigzag[1]) == "2-4x0-4");
  CHECK(pieces(causal, one, zigzag[1], zigzag[0]) == "0-4x0-2");
  const auto stripes = context::striped_order(8, 2);
  CHECK(pieces(causal, one, stripes[0], stripes[1]) == "1-4x0-3c");
  const auto all = context::contiguous_order(8, 1)[0];
  CHECK(pieces(AttentionMask::causal_documents(), two, all, all) == "0-3x0-3c 3-8x3-8c");
  CHECK(pieces(AttentionMask::shared_question(), PackedSequence({2, 3, 3}), all, all) == "0-5x0-5c 5-8x0-2 5-8x5-8c");
  CHECK_FALSE(context::pieces_of(context::BlockMask(AttentionMask::causal_sliding_window(2), one, all, all), 4));
}

// Each pair that the mask shows lies in one piece.
TEST_CASE("context choice: pieces cover each pair once", "[context]") {
  const PackedSequence packed({5, 9, 1, 8});
  const auto window = AttentionMask::sliding_window(3, 1);
  const auto prefixes = AttentionMask::prefix_lm_documents({2, 0, 1, 20});
  for (const auto& mask : {window, prefixes, AttentionMask::causal_blocks(), AttentionMask::global_sliding_window(2, 3, 1),
                           AttentionMask::from([](int64_t q, int64_t k, int64_t, int64_t) { return (q * 7 + k * 13) % 5 < 2; })}) {
    for (const auto& rows : {context::zigzag_order(23, 2), context::striped_order(23, 3)}) {
      const context::BlockMask block(mask, packed, rows[0], rows[1]);
      std::vector<int> count(rows[0].size() * rows[1].size(), 0);
      const auto all = context::pieces_of(block, 1000).value();
      for (const auto& piece : all) {
        for (auto q = piece.queries.begin; q < piece.queries.end; ++q) {
          const auto end = piece.causal ? piece.keys.begin + (q - piece.queries.begin) + 1 : piece.keys.end;
          for (auto k = piece.keys.begin; k < end; ++k) ++count[q * static_cast<int64_t>(rows[1].size()) + k];
        }
      }
      for (size_t i = 0; i < count.size(); ++i) {
        CAPTURE(mask.name(), i);
        const bool seen = mask.allows(rows[0][i / rows[1].size()], rows[1][i % rows[1].size()], packed);
        REQUIRE(count[i] == (seen ? 1 : 0));
      }
    }
  }
}
