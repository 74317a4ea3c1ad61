// Which blocks of a cache of keys and values are in use, by how many sequences, and what they hold. Numbers only: the keys and values
// themselves lie in Pages (paged_attention.hpp).
//
// A block has room for kBlockRows positions of a sequence, in all layers. A full block may be found again by what it holds: its tokens and
// those before them. So prompts that begin alike share blocks. A block that nobody uses keeps what it holds until its room is needed; the
// least recently used one goes first, and of one sequence the last block (as in vLLM; Kwon et al., "Efficient Memory Management for Large
// Language Model Serving with PagedAttention", 2023).
#pragma once

#include <dtensor/base/error.hpp>

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::generate {

constexpr int64_t kBlockRows = 16;

using Block = int32_t;
using Tokens = std::vector<int64_t>;

class Blocks {
 public:
  // `share`: whether full blocks may be found again. Throws for less than one block.
  explicit Blocks(int64_t count, bool share = true);

  int64_t count() const { return static_cast<int64_t>(all_.size()); }
  int64_t unused() const { return static_cast<int64_t>(unused_.size()); }
  int64_t users(Block block) const { return all_[block].users; }
  int64_t found() const { return found_; }  // how many blocks find() gave so far

  // A block with one user, whose former contents are forgotten. Nothing when all are in use.
  std::optional<Block> take();
  void hold(Block block);     // one more user
  void release(Block block);  // one less; what it holds may still be found

  // What a block holds: these tokens, after those of the content `before` (0: at the begin). A content is a number that equals another's
  // only if all tokens up to there are equal. Returns the content of the block. When another block holds the same, that one stays the one
  // to be found.
  int64_t fill(Block block, int64_t before, std::span<const int64_t> tokens);
  // A block that holds these tokens after `before`, now with one more user, and its content.
  std::optional<std::pair<Block, int64_t>> find(int64_t before, std::span<const int64_t> tokens);

  // From now on nothing that was filled is found: the weights have changed.
  void forget();

 private:
  using Key = std::pair<int64_t, Tokens>;
  struct Filled {
    Block block;
    int64_t content;
  };
  struct State {
    int64_t users = 0;
    std::list<Block>::iterator place{};                      // in unused_, while there are no users
    std::optional<std::map<Key, Filled>::iterator> found{};  // where it can be found
  };

  std::vector<State> all_;
  std::list<Block> unused_;  // the next to be taken first
  std::map<Key, Filled> filled_;
  const bool share_;
  int64_t contents_ = 0, found_ = 0;
};

// The blocks of one sequence, in order. Copies of blocks that are to be made, before anything is written, are collected by the caller.
class PageTable {
 public:
  using Copies = std::vector<std::pair<Block, Block>>;  // from, to

  explicit PageTable(Blocks& blocks) : blocks_(&blocks) {}
  PageTable(PageTable&& other) noexcept { *this = std::move(other); }
  PageTable& operator=(PageTable&& other) noexcept;
  ~PageTable() { clear(); }

  const std::vector<Block>& blocks() const { return table_; }
  int64_t rows() const { return static_cast<int64_t>(table_.size()) * kBlockRows; }  // that there is room for

  // Of an empty table: takes the blocks that hold the begin of `tokens`, at most `most` tokens of them. Returns how many tokens they hold.
  int64_t match(const Tokens& tokens, int64_t most);
  // Makes room for rows `begin` to `end` to be written, by new blocks. A block with other users that is to be written is copied. Returns
  // false, and changes nothing, when there are too few blocks.
  bool reserve(int64_t begin, int64_t end, Copies& copies);
  // How many blocks reserve() would take.
  int64_t needed(int64_t begin, int64_t end) const;
  // That rows up to `rows` hold the keys and values of `tokens`: full blocks can be found from now on.
  void filled(const Tokens& tokens, int64_t rows);
  // The blocks that hold rows before `rows`, shared, for a sequence with the same tokens so far.
  PageTable fork(int64_t rows) const;
  // Lets go of all blocks, the last first.
  void clear();
  // Other blocks are found from now on, as after Blocks::forget().
  void forget() { contents_.clear(), forgotten_ = true; }

 private:
  Blocks* blocks_ = nullptr;
  std::vector<Block> table_;
  std::vector<int64_t> contents_;  // of the full blocks, as far as they are known
  bool forgotten_ = false;         // holds what is not to be found
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline Blocks::Blocks(int64_t count, bool share) : share_(share) {
  require(count >= 1, "generate", "a cache needs at least one block of {} positions; got {}", kBlockRows, count);
  all_.resize(count);
  for (Block block = 0; block < count; ++block) all_[block].place = unused_.insert(unused_.end(), block);
}

inline std::optional<Block> Blocks::take() {
  if (unused_.empty()) return {};
  const auto block = unused_.front();
  unused_.pop_front();
  auto& state = all_[block];
  state.users = 1;
  if (state.found) filled_.erase(*state.found);
  state.found.reset();
  return block;
}

inline void Blocks::hold(Block block) {
  auto& state = all_[block];
  if (state.users++ == 0) unused_.erase(state.place);
}

inline void Blocks::release(Block block) {
  auto& state = all_[block];
  if (--state.users > 0) return;
  state.place = unused_.insert(state.found ? unused_.end() : unused_.begin(), block);
}

inline int64_t Blocks::fill(Block block, int64_t before, std::span<const int64_t> tokens) {
  if (!share_) return 0;
  const auto [place, is_new] = filled_.try_emplace(Key{before, Tokens(tokens.begin(), tokens.end())}, Filled{block, contents_ + 1});
  if (is_new) {
    ++contents_;
    all_[block].found = place;
  }
  return place->second.content;
}

inline std::optional<std::pair<Block, int64_t>> Blocks::find(int64_t before, std::span<const int64_t> tokens) {
  if (!share_) return {};
  const auto place = filled_.find(Key{before, Tokens(tokens.begin(), tokens.end())});
  if (place == filled_.end()) return {};
  hold(place->second.block);
  ++found_;
  return std::pair(place->second.block, place->second.content);
}

inline void Blocks::forget() {
  filled_.clear();
  for (auto& state : all_) state.found.reset();
}

inline PageTable& PageTable::operator=(PageTable&& other) noexcept {
  if (this == &other) return *this;
  clear();
  blocks_ = other.blocks_;
  table_ = std::exchange(other.table_, {});
  contents_ = std::exchange(other.contents_, {});
  forgotten_ = std::exchange(other.forgotten_, false);
  return *this;
}

inline int64_t PageTable::match(const Tokens& tokens, int64_t most) {
  int64_t rows = 0;
  for (; rows + kBlockRows <= most; rows += kBlockRows) {
    const auto found = blocks_->find(contents_.empty() ? 0 : contents_.back(), std::span(tokens).subspan(rows, kBlockRows));
    if (!found) break;
    table_.push_back(found->first);
    contents_.push_back(found->second);
  }
  return rows;
}

inline int64_t PageTable::needed(int64_t begin, int64_t end) const {
  const auto blocks = (end + kBlockRows - 1) / kBlockRows;
  const auto more = std::max<int64_t>(0, blocks - static_cast<int64_t>(table_.size()));
  const bool copies = begin < end && begin < rows() && blocks_->users(table_[begin / kBlockRows]) > 1;
  return more + (copies ? 1 : 0);
}

inline bool PageTable::reserve(int64_t begin, int64_t end, Copies& copies) {
  if (begin >= end) return true;
  if (needed(begin, end) > blocks_->unused()) return false;
  if (begin < rows()) {
    auto& block = table_[begin / kBlockRows];
    if (blocks_->users(block) > 1) {
      const auto own = *blocks_->take();
      copies.emplace_back(block, own);
      blocks_->release(block);
      block = own;
    }
  }
  while (rows() < end) table_.push_back(*blocks_->take());
  return true;
}

inline void PageTable::filled(const Tokens& tokens, int64_t rows) {
  if (forgotten_) return;
  for (auto i = static_cast<int64_t>(contents_.size()); (i + 1) * kBlockRows <= rows; ++i) {
    const auto of_block = std::span(tokens).subspan(i * kBlockRows, kBlockRows);
    contents_.push_back(blocks_->fill(table_[i], contents_.empty() ? 0 : contents_.back(), of_block));
  }
}

inline PageTable PageTable::fork(int64_t rows) const {
  PageTable other(*blocks_);
  const auto shared = std::min<size_t>((rows + kBlockRows - 1) / kBlockRows, table_.size());
  other.table_.assign(table_.begin(), table_.begin() + static_cast<int64_t>(shared));
  for (const auto block : other.table_) blocks_->hold(block);
  other.contents_.assign(contents_.begin(), contents_.begin() + static_cast<int64_t>(std::min(shared, contents_.size())));
  other.forgotten_ = forgotten_;
  return other;
}

inline void PageTable::clear() {
  for (; !table_.empty(); table_.pop_back()) blocks_->release(table_.back());
  contents_.clear();
  forgotten_ = false;
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
