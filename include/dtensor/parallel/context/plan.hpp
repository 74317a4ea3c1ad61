// How a sequence lies on the ranks of a group, under which mask: who needs whose keys.
#pragma once

#include <dtensor/parallel/context/mask_pieces.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#pragma GCC visibility push(default)

namespace dtensor {

// Cheap to copy.
class ContextPlan {
 public:
  using Positions = context::Positions;

  // `rows`: of each rank of the group, the positions of its rows in ascending order; each position of the sequence is a row of one rank.
  // `sequences`: one for all rows of the batch, or one for each. Every rank makes it alike. Throws for positions that are missing, twice or
  // not in order, for sequences of other lengths, and for a mask that does not fit them.
  ContextPlan(AttentionMask mask, std::vector<PackedSequence> sequences, std::vector<Positions> rows);

  int ranks() const { return static_cast<int>(state_->rows.size()); }
  int64_t length() const { return state_->sequences[0].length(); }
  int64_t batch() const { return static_cast<int64_t>(state_->sequences.size()); }  // 1: any
  // Here and below, throws for a rank that the plan does not have.
  const Positions& rows(int rank) const { return state_->rows[checked(rank)]; }
  int64_t length(int rank) const { return static_cast<int64_t>(rows(rank).size()); }

  // Between the queries of one rank and the keys of another, for each row of the batch. Made at the first call, then kept.
  std::vector<const context::MaskInPieces*> masks(int query_rank, int key_rank) const;
  // Whether any query of one rank sees any key of the other.
  bool meet(int query_rank, int key_rank) const;
  // The plan in which `size` neighbours are one rank that has the rows of all of them; `size` divides the ranks. Made at the first call.
  const ContextPlan& of_groups(int size) const;
  // Where the rank's rows are among those of its group of `size` neighbours: int64 [rows]. Made at the first call.
  at::Tensor places_in_group(int rank, int size) const;
  // Of the other ranks, how many have keys that a rank's queries see; of the rank with the most.
  int64_t most_met() const;
  // Pairs of a query of this rank and a key that it sees, in all rows of the batch.
  int64_t cells(int query_rank) const;

  const AttentionMask& mask() const { return state_->mask; }
  const std::vector<PackedSequence>& sequences() const { return state_->sequences; }

  // What the ranks of a group have found out together about their plans: that these are alike; that the mask's predicate has answered for
  // all pairs of each rank's queries, or for all pairs. Threads may share a plan: this is kept for each rank.
  enum class Settled { alike, own_pairs, all_pairs };
  bool is_settled(Settled what, World& world, const comm::Communicator& group) const;
  void settle(Settled what, World& world, const comm::Communicator& group) const;

 private:
  struct State {
    State(AttentionMask m, std::vector<PackedSequence> s, std::vector<Positions> r)
        : mask(std::move(m)), sequences(std::move(s)), rows(std::move(r)) {}
    const AttentionMask mask;
    const std::vector<PackedSequence> sequences;
    const std::vector<Positions> rows;
    // What was made so far:
    std::mutex mutex;
    std::map<std::weak_ptr<const int>, std::set<std::pair<const comm::Communicator*, Settled>>, std::owner_less<>> settled;  // by rank
    std::map<std::tuple<int, int>, bool> meet;
    std::map<int, int64_t> cells;
    std::optional<int64_t> most_met;
    std::map<std::tuple<int, int>, std::vector<std::unique_ptr<const context::MaskInPieces>>> masks;
    std::map<int, std::unique_ptr<const ContextPlan>> groups;
    std::map<std::tuple<int, int>, at::Tensor> places;
  };
  size_t checked(int rank) const;

  std::shared_ptr<State> state_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline ContextPlan::ContextPlan(AttentionMask mask, std::vector<PackedSequence> sequences, std::vector<Positions> rows)
    : state_(std::make_shared<State>(std::move(mask), std::move(sequences), std::move(rows))) {
  require(!state_->sequences.empty() && !state_->rows.empty(), "ContextPlan",
          "got {} sequences and rows of {} ranks; expected one or more of each", state_->sequences.size(), state_->rows.size());
  for (const auto& sequence : state_->sequences) {
    require(sequence.length() == length(), "ContextPlan", "got sequences of {} and {} positions; expected one length", length(),
            sequence.length());
    state_->mask.check(sequence);
  }
  std::vector<int> owner(length(), -1);
  int64_t owned = 0;
  for (int r = 0; r < ranks(); ++r) {
    int64_t before = -1;
    for (const auto position : state_->rows[r]) {
      require(0 <= position && position < length(), "ContextPlan", "rank {} has position {} of a sequence of {}", r, position, length());
      require(position > before, "ContextPlan", "rank {} has position {} after {}; expected ascending positions", r, position, before);
      require(owner[position] < 0, "ContextPlan", "ranks {} and {} both have position {}; expected a permutation", owner[position], r,
              position);
      owner[position] = r;
      before = position;
      ++owned;
    }
  }
  const auto missing = std::ranges::find(owner, -1) - owner.begin();
  require(owned == length(), "ContextPlan", "no rank has position {}; expected a permutation of {} positions", missing, length());
}

inline size_t ContextPlan::checked(int rank) const {
  require(0 <= rank && rank < ranks(), "ContextPlan",
          "there is no rank {} of {}; expected 0 to {}; hint: a plan numbers the ranks of its mesh, in the order of mesh.ranks()", rank,
          ranks(), ranks() - 1);
  return static_cast<size_t>(rank);
}

inline std::vector<const context::MaskInPieces*> ContextPlan::masks(int query_rank, int key_rank) const {
  const auto &queries = rows(query_rank), &keys = rows(key_rank);
  std::lock_guard lock(state_->mutex);
  auto& own = state_->masks[{query_rank, key_rank}];
  if (own.empty()) {
    std::vector<std::unique_ptr<const context::MaskInPieces>> made;
    for (const auto& sequence : state_->sequences) {
      made.push_back(std::make_unique<context::MaskInPieces>(context::BlockMask(state_->mask, sequence, queries, keys)));
    }
    own = std::move(made);
  }
  std::vector<const context::MaskInPieces*> result;
  for (const auto& mask : own) result.push_back(mask.get());
  return result;
}

namespace context::detail {

// A rank, while it lives.
struct RankIdentity {
  std::shared_ptr<const int> token = std::make_shared<const int>(0);
};

}  // namespace context::detail

inline bool ContextPlan::is_settled(Settled what, World& world, const comm::Communicator& group) const {
  std::lock_guard lock(state_->mutex);
  const auto found = state_->settled.find(world.local<context::detail::RankIdentity>().token);
  return found != state_->settled.end() && found->second.contains({&group, what});
}

inline void ContextPlan::settle(Settled what, World& world, const comm::Communicator& group) const {
  std::lock_guard lock(state_->mutex);
  state_->settled[world.local<context::detail::RankIdentity>().token].insert({&group, what});
}

inline const ContextPlan& ContextPlan::of_groups(int size) const {
  if (size == 1) return *this;
  require(size >= 1 && ranks() % size == 0, "ContextPlan", "got groups of {} of {} ranks; expected a divisor", size, ranks());
  std::lock_guard lock(state_->mutex);
  auto& known = state_->groups[size];
  if (!known) {
    std::vector<Positions> rows(ranks() / size);
    for (int r = 0; r < ranks(); ++r) rows[r / size].insert(rows[r / size].end(), state_->rows[r].begin(), state_->rows[r].end());
    for (auto& own : rows) std::ranges::sort(own);
    known = std::make_unique<const ContextPlan>(state_->mask, state_->sequences, std::move(rows));
  }
  return *known;
}

inline at::Tensor ContextPlan::places_in_group(int rank, int size) const {
  const auto &all = of_groups(size).rows(rank / size), &own = rows(rank);
  std::lock_guard lock(state_->mutex);
  auto& known = state_->places[{rank, size}];
  if (!known.defined()) {
    const NoSpmd plain;
    Positions places;
    for (const auto position : own) places.push_back(std::ranges::lower_bound(all, position) - all.begin());
    known = at::tensor(places, at::kLong);
  }
  return known;
}

inline bool ContextPlan::meet(int query_rank, int key_rank) const {
  const auto &queries = rows(query_rank), &keys = rows(key_rank);
  std::lock_guard lock(state_->mutex);
  const auto known = state_->meet.find({query_rank, key_rank});
  if (known != state_->meet.end()) return known->second;
  const bool any = std::ranges::any_of(state_->sequences, [&](const PackedSequence& sequence) {
    return context::any_meet(state_->mask, sequence, queries, keys);
  });
  return state_->meet[{query_rank, key_rank}] = any;
}

inline int64_t ContextPlan::most_met() const {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->most_met) return *state_->most_met;
  }
  int64_t most = 0;
  for (int r = 0; r < ranks(); ++r) {
    int64_t met = 0;
    for (int other = 0; other < ranks(); ++other) met += other != r && meet(r, other);
    most = std::max(most, met);
  }
  std::lock_guard lock(state_->mutex);
  state_->most_met = most;
  return most;
}

inline int64_t ContextPlan::cells(int query_rank) const {
  const auto& queries = rows(query_rank);
  std::lock_guard lock(state_->mutex);
  const auto known = state_->cells.find(query_rank);
  if (known != state_->cells.end()) return known->second;
  Positions all(length());
  std::iota(all.begin(), all.end(), int64_t{0});
  int64_t cells = 0;
  for (const auto& sequence : state_->sequences) cells += context::BlockMask(state_->mask, sequence, queries, all).cells();
  return state_->cells[query_rank] = cells;
}

}  // namespace dtensor

#pragma GCC visibility pop
