// Blocks of the cache: users, what is found again, and which goes first.
#include "tests/support/core_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/generate/scheduler.hpp>

#include <random>
#include <set>

using namespace dtensor;
using namespace dtensor::test;
using generate::Blocks;
using generate::kBlockRows;
using generate::PageTable;
using generate::Tokens;

namespace {

Tokens counting(int64_t count, int64_t from = 0) {
  Tokens tokens(count);
  for (int64_t i = 0; i < count; ++i) tokens[i] = from + i;
  return tokens;
}

}  // namespace

TEST_CASE("generate blocks: a prompt is found by its full blocks", "[generate]") {
  Blocks blocks(8);
  const auto tokens = counting(40);
  PageTable::Copies copies;
  {
    PageTable table(blocks);
    REQUIRE(table.match(tokens, 39) == 0);
    REQUIRE(table.reserve(0, 40, copies));
    table.filled(tokens, 40);
    REQUIRE(blocks.unused() == 5);
  }
  REQUIRE(blocks.unused() == 8);
  PageTable again(blocks);
  CHECK(again.match(tokens, 39) == 32);  // the third block is not full
  CHECK(blocks.unused() == 6);
  auto other = tokens;
  other[3] = 99;  // what comes before counts too
  PageTable third(blocks);
  CHECK(third.match(other, 39) == 0);
  other = tokens;
  other[20] = 99;
  CHECK(third.match(other, 39) == 16);
  CHECK(third.blocks()[0] == again.blocks()[0]);
  CHECK(blocks.users(again.blocks()[0]) == 2);
  CHECK(copies.empty());
}

TEST_CASE("generate blocks: the least recently used goes first and the tail of a sequence before its begin", "[generate]") {
  Blocks blocks(4);
  PageTable::Copies copies;
  const auto first = counting(32), second = counting(32, 100);
  for (const auto& tokens : {first, second}) {
    PageTable table(blocks);
    REQUIRE(table.reserve(0, 32, copies));
    table.filled(tokens, 32);
  }
  PageTable one(blocks);
  REQUIRE(one.reserve(0, 1, copies));  // takes the last block of the first
  {
    PageTable found(blocks);
    CHECK(found.match(first, 32) == 16);
    PageTable whole(blocks);
    CHECK(whole.match(second, 32) == 32);
  }
}

TEST_CASE("generate blocks: forks share blocks until they write", "[generate]") {
  Blocks blocks(6);
  PageTable::Copies copies;
  PageTable table(blocks);
  const auto tokens = counting(20);
  REQUIRE(table.reserve(0, 20, copies));
  table.filled(tokens, 20);
  auto fork = table.fork(20);
  CHECK(blocks.unused() == 4);
  REQUIRE(fork.reserve(20, 21, copies));
  REQUIRE(copies.size() == 1);
  CHECK(copies[0].first == table.blocks()[1]);
  CHECK(copies[0].second == fork.blocks()[1]);
  CHECK(fork.blocks()[0] == table.blocks()[0]);
  REQUIRE(table.reserve(20, 21, copies));  // alone again: no copy
  CHECK(copies.size() == 1);
  CHECK(blocks.unused() == 3);
  REQUIRE_FALSE(table.reserve(21, 16 * 6, copies));  // and changes nothing
  CHECK(blocks.unused() == 3);
  REQUIRE(table.reserve(21, 40, copies));  // rows that a fork at 21 has no part in
  CHECK(table.fork(21).blocks().size() == 2);
}

TEST_CASE("generate blocks: nothing is found once the weights have changed", "[generate]") {
  Blocks blocks(4);
  PageTable::Copies copies;
  const auto tokens = counting(48);
  PageTable old(blocks);
  REQUIRE(old.reserve(0, 32, copies));
  old.filled(tokens, 32);
  blocks.forget();
  old.forget();
  REQUIRE(old.reserve(32, 48, copies));
  old.filled(tokens, 48);  // by old weights
  PageTable fresh(blocks);
  CHECK(fresh.match(tokens, 48) == 0);
  refuses("at least one block", [] { Blocks none(0); });
}

TEST_CASE("generate blocks: random sequences leave no block behind", "[generate]") {
  std::mt19937_64 random(7);
  Blocks blocks(40);
  std::vector<std::pair<PageTable, Tokens>> tables;
  std::vector<int64_t> ends;
  PageTable::Copies copies;
  for (int i = 0; i < 5000; ++i) {
    const auto what = random() % 4;
    if (tables.empty() || (what == 0 && tables.size() < 20)) {
      tables.emplace_back(PageTable(blocks), counting(200, static_cast<int64_t>(random() % 3)));
      auto& [table, tokens] = tables.back();
      ends.push_back(table.match(tokens, static_cast<int64_t>(random() % 200)));
      continue;
    }
    const auto at = random() % tables.size();
    auto& [table, tokens] = tables[at];
    if (what == 1 && tables.size() < 20) {
      auto fork = table.fork(ends[at]);
      auto same = tokens;
      const auto end = ends[at];
      tables.emplace_back(std::move(fork), std::move(same));
      ends.push_back(end);
    } else if (what <= 2) {
      const auto end = std::min<int64_t>(200, ends[at] + 1 + static_cast<int64_t>(random() % 30));
      const auto before = blocks.unused();
      if (table.reserve(ends[at], end, copies)) {
        table.filled(tokens, ends[at] = end);
      } else {
        REQUIRE(blocks.unused() == before);
      }
    } else {
      tables.erase(tables.begin() + static_cast<int64_t>(at));
      ends.erase(ends.begin() + static_cast<int64_t>(at));
    }
    std::set<generate::Block> in_use;
    for (const auto& [other, unused] : tables) in_use.insert(other.blocks().begin(), other.blocks().end());
    REQUIRE(static_cast<int64_t>(in_use.size()) + blocks.unused() == 40);
  }
  tables.clear();
  CHECK(blocks.unused() == 40);
}
