// Masks as descriptions: pairs, runs and tiles against definitions written out pair by pair.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/parallel/context/orders.hpp>

#include <random>

using namespace dtensor;
using namespace dtensor::test;
using context::BlockMask;
using context::Cover;
using context::Positions;

namespace {

using Allows = std::function<bool(int64_t q, int64_t k)>;

struct Defined {
  AttentionMask mask;
  Allows allows;
};

// Of documents of 5, 9, 1 and 8 positions.
const PackedSequence kPacked({5, 9, 1, 8});
int document(int64_t position) { return position < 5 ? 0 : position < 14 ? 1 : position < 15 ? 2 : 3; }
int64_t begin_of(int64_t position) { return std::vector<int64_t>{0, 5, 14, 15}[document(position)]; }

bool in_one(int64_t q, int64_t k) { return document(q) == document(k); }

std::vector<Defined> all() {
  const auto in_window = [](int64_t q, int64_t k, int64_t before, int64_t after) { return k >= q - before && k <= q + after; };
  const std::vector<int64_t> prefixes{2, 0, 1, 20};
  return {
      {AttentionMask::full(), [](int64_t, int64_t) { return true; }},
      {AttentionMask::causal(), [](int64_t q, int64_t k) { return k <= q; }},
      {AttentionMask::sliding_window(4, 2), [=](int64_t q, int64_t k) { return in_window(q, k, 4, 2); }},
      {AttentionMask::sliding_window(0, 0), [](int64_t q, int64_t k) { return q == k; }},
      {AttentionMask::causal_sliding_window(3), [=](int64_t q, int64_t k) { return in_window(q, k, 3, 0); }},
      {AttentionMask::global_sliding_window(2, 3, 1),
       [=](int64_t q, int64_t k) { return q < 2 || k < 2 || in_window(q, k, 3, 1); }},
      {AttentionMask::documents(), in_one},
      {AttentionMask::causal_documents(), [](int64_t q, int64_t k) { return in_one(q, k) && k <= q; }},
      {AttentionMask::prefix_lm(6), [](int64_t q, int64_t k) { return k <= q || k < 6; }},
      {AttentionMask::prefix_lm_documents(prefixes),
       [=](int64_t q, int64_t k) { return in_one(q, k) && (k <= q || k - begin_of(k) < prefixes[document(k)]); }},
      {AttentionMask::shared_question(),
       [](int64_t q, int64_t k) { return (in_one(q, k) && k <= q) || (document(q) != 0 && document(k) == 0); }},
      {AttentionMask::shared_runs({{0, 0}, {1, 4}, {0, 14}, {5, 7}}),
       [](int64_t q, int64_t k) {
         const Interval runs[] = {{0, 0}, {1, 4}, {0, 14}, {5, 7}};
         return (in_one(q, k) && k <= q) || (runs[document(q)].begin <= k && k < runs[document(q)].end);
       }},
      {AttentionMask::causal_blocks(), [](int64_t q, int64_t k) { return k <= q && (in_one(q, k) || document(q) == 3); }},
      {AttentionMask::block_causal_documents(4),
       [](int64_t q, int64_t k) { return in_one(q, k) && (k - begin_of(k)) / 4 <= (q - begin_of(q)) / 4; }},
      {AttentionMask::from([](int64_t q, int64_t k, int64_t a, int64_t b) { return (q + k) % 3 != 0 || a == b; }),
       [](int64_t q, int64_t k) { return (q + k) % 3 != 0 || in_one(q, k); }},
  };
}

// Where a number is as large as can be, there is no limit.
std::vector<Defined> all_without_limits() {
  const auto all = [](int64_t, int64_t) { return true; };
  const auto before = [](int64_t q, int64_t k) { return k <= q; };
  std::vector<Defined> masks;
  for (const auto most : {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max() - 1, int64_t{1} << 62}) {
    const std::vector<Defined> of_most{
        {AttentionMask::sliding_window(most, most), all},
        {AttentionMask::sliding_window(most, 0), before},
        {AttentionMask::sliding_window(1, most), [](int64_t q, int64_t k) { return k >= q - 1; }},
        {AttentionMask::causal_sliding_window(most), before},
        {AttentionMask::global_sliding_window(most, 0, 0), all},
        {AttentionMask::global_sliding_window(0, 1, most), [](int64_t q, int64_t k) { return k >= q - 1; }},
        {AttentionMask::global_sliding_window(2, most, 0), [](int64_t q, int64_t k) { return q < 2 || k < 2 || k <= q; }},
        {AttentionMask::prefix_lm(most), all},
        {AttentionMask::prefix_lm_documents({most, 0, most, most}),
         [](int64_t q, int64_t k) { return in_one(q, k) && (k <= q || document(q) != 1); }},
        {AttentionMask::block_causal_documents(most), in_one},
    };
    masks.insert(masks.end(), of_most.begin(), of_most.end());
  }
  return masks;
}

void check_block(const Defined& defined, const Positions& queries, const Positions& keys) {
  const BlockMask block(defined.mask, kPacked, queries, keys);
  int64_t cells = 0;
  for (size_t q = 0; q < queries.size(); ++q) {
    for (size_t k = 0; k < keys.size(); ++k) cells += defined.allows(queries[q], keys[k]);
  }
  REQUIRE(block.cells() == cells);
  REQUIRE(context::any_meet(defined.mask, kPacked, queries, keys) == (cells > 0));
  const auto rows = static_cast<int64_t>(queries.size()), columns = static_cast<int64_t>(keys.size());
  for (const auto& q : {Interval{0, rows}, Interval{rows / 3, rows / 2 + 1}}) {
    for (const auto& k : {Interval{0, columns}, Interval{columns / 2, columns}, Interval{0, columns / 3 + 1}}) {
      if (q.end > rows || k.end > columns) continue;
      std::vector<char> hidden(q.length() * k.length());
      block.write_hidden(q, k, reinterpret_cast<bool*>(hidden.data()));
      int64_t seen = 0;
      for (int64_t i = 0; i < q.length(); ++i) {
        for (int64_t j = 0; j < k.length(); ++j) {
          const bool allowed = defined.allows(queries[q.begin + i], keys[k.begin + j]);
          REQUIRE((hidden[i * k.length() + j] == 0) == allowed);
          seen += allowed;
        }
      }
      const auto pairs = q.length() * k.length();
      if (pairs > 0) REQUIRE(block.cover(q, k) == (seen == 0 ? Cover::none : seen == pairs ? Cover::all : Cover::some));
    }
  }
}

}  // namespace

TEST_CASE("attention mask: pairs are those of the definition", "[context]") {
  for (const auto& defined : all()) {
    CAPTURE(defined.mask.name());
    for (int64_t q = 0; q < kPacked.length(); ++q) {
      for (int64_t k = 0; k < kPacked.length(); ++k) REQUIRE(defined.mask.allows(q, k, kPacked) == defined.allows(q, k));
    }
  }
}

TEST_CASE("attention mask: the largest numbers are no limits", "[context]") {
  for (const auto& defined : all_without_limits()) {
    CAPTURE(defined.mask.name());
    for (int64_t q = 0; q < kPacked.length(); ++q) {
      for (int64_t k = 0; k < kPacked.length(); ++k) REQUIRE(defined.mask.allows(q, k, kPacked) == defined.allows(q, k));
    }
    for (const auto& rows : context::balanced_order(defined.mask, kPacked, 3, 4)) check_block(defined, rows, rows);
  }
}

TEST_CASE("attention mask: blocks of any rows say what is in a tile", "[context]") {
  for (const auto& defined : all()) {
    CAPTURE(defined.mask.name());
    for (const int ranks : {1, 2, 3, 5}) {
      const std::vector<Positions> orders[] = {context::contiguous_order(23, ranks), context::zigzag_order(23, ranks),
                                               context::striped_order(23, ranks, 2),
                                               context::balanced_order(defined.mask, kPacked, ranks, 3)};
      for (const auto& rows : orders) {
        const ContextPlan plan(defined.mask, {kPacked}, rows);
        int64_t cells = 0;
        for (int q = 0; q < ranks; ++q) {
          for (int k = 0; k < ranks; ++k) check_block(defined, rows[q], rows[k]);
          cells += plan.cells(q);
        }
        REQUIRE(cells == plan.of_groups(ranks).cells(0));
      }
    }
  }
}

TEST_CASE("attention mask: a causal zigzag and balanced blocks have even work", "[context]") {
  const auto work = [](const AttentionMask& mask, const PackedSequence& sequence, const std::vector<Positions>& rows) {
    const ContextPlan plan(mask, {sequence}, rows);
    int64_t most = 0, sum = 0;
    for (int r = 0; r < plan.ranks(); ++r) most = std::max(most, plan.cells(r)), sum += plan.cells(r);
    return static_cast<double>(most) * plan.ranks() / static_cast<double>(sum);
  };
  const auto causal = AttentionMask::causal();
  for (const int ranks : {2, 4, 8}) {
    const PackedSequence sequence(1024);
    CHECK(work(causal, sequence, context::zigzag_order(1024, ranks)) == 1);
    CHECK(work(causal, sequence, context::contiguous_order(1024, ranks)) == Approx(2 - 1.0 / ranks).epsilon(0.01));
    CHECK(work(causal, sequence, context::striped_order(1024, ranks)) < 1.01);
  }
  CHECK(work(causal, PackedSequence(1024), context::striped_order(1024, 4)) == Approx(1.0029).epsilon(1e-4));
  const PackedSequence packed({700, 40, 150, 600, 300, 258});
  for (const auto& mask : {AttentionMask::causal_documents(), AttentionMask::documents(), AttentionMask::shared_question()}) {
    CAPTURE(mask.name());
    CHECK(work(mask, packed, context::balanced_order(mask, packed, 4, 16)) < 1.02);
  }
}

TEST_CASE("attention mask: what does not fit is refused", "[context][errors]") {
  CHECK_THROWS_WITH(PackedSequence(std::vector<int64_t>{3, 0}), says("document 1 has 0 positions"));
  CHECK_THROWS_WITH(PackedSequence(std::vector<int64_t>{}), says("got no documents"));
  CHECK_THROWS_WITH(AttentionMask::sliding_window(-1, 2), says("sliding_window(-1, 2) has a negative number"));
  CHECK_THROWS_WITH(AttentionMask::causal_sliding_window(-1), says("causal_sliding_window(-1) has a negative number"));
  CHECK_THROWS_WITH(AttentionMask::global_sliding_window(1, -2, 3), says("global_sliding_window(1, -2, 3) has a negative number"));
  CHECK_THROWS_WITH(AttentionMask::block_causal_documents(0), says("blocks of 0 positions"));
  CHECK_THROWS_WITH(AttentionMask::from({}), says("empty function"));
  const auto causal = AttentionMask::causal();
  const std::vector<PackedSequence> four{PackedSequence(4)};
  CHECK_THROWS_WITH(ContextPlan(causal, four, {{0, 1}, {3}}), says("no rank has position 2"));
  CHECK_THROWS_WITH(ContextPlan(causal, four, {{0, 1, 2}, {2, 3}}), says("ranks 0 and 1 both have position 2"));
  CHECK_THROWS_WITH(ContextPlan(causal, four, {{1, 0}, {2, 3}}), says("rank 0 has position 0 after 1"));
  CHECK_THROWS_WITH(ContextPlan(causal, four, {{0, 1}, {2, 4}}), says("rank 1 has position 4 of a sequence of 4"));
  CHECK_THROWS_WITH(ContextPlan(causal, {}, {{0}}), says("got 0 sequences"));
  CHECK_THROWS_WITH(ContextPlan(causal, {PackedSequence(4), PackedSequence(5)}, {{0, 1, 2, 3}}), says("4 and 5 positions"));
  const auto two = AttentionMask::prefix_lm_documents({1, 2});
  CHECK_THROWS_WITH(ContextPlan(two, {PackedSequence({4, 5, 6})}, context::contiguous_order(15, 1)), says("2 prefixes for 3 documents"));
  const auto shared = AttentionMask::shared_runs({{0, 0}, {0, 5}});
  CHECK_THROWS_WITH(ContextPlan(shared, {PackedSequence({4, 5, 6})}, context::contiguous_order(15, 1)), says("2 runs for 3 documents"));
  CHECK_THROWS_WITH(ContextPlan(shared, {PackedSequence({4, 5})}, context::contiguous_order(9, 1)),
                    says("document 1 begins at 4, and shares positions 0 to 5; expected them before it"));
  CHECK_THROWS_WITH(AttentionMask::shared_runs({{3, 2}}), says("positions 3 to 2"));
  const ContextPlan throwing(AttentionMask::from([](int64_t q, int64_t, int64_t, int64_t) -> bool {
                               if (q == 2) throw std::runtime_error("out of cheese");
                               return true;
                             }),
                             four, context::contiguous_order(4, 2));
  for (int again = 0; again < 2; ++again) {
    CHECK_THROWS_WITH(throwing.masks(1, 0), says("out of cheese"));
    CHECK_THROWS_WITH(throwing.meet(1, 0), says("out of cheese"));
  }
  CHECK(throwing.meet(0, 1));
}
