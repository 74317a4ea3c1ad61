// Dispatch, feed-forward and combine in tiles of tokens: what arrived is computed while the next tile's rows travel (as Zhang et al.,
// "Comet", 2025, do within kernels).
#pragma once

#include <dtensor/parallel/expert/exchange.hpp>
#include <dtensor/parallel/expert/feed_forward.hpp>

#include <deque>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// The part of each rank's tokens, [n i / tiles, n (i + 1) / tiles) of its n, that tile i has.
Group tile_of(const Group& group, int64_t i, int64_t tiles);

// All of them, and how many of this rank's n tokens each has.
struct Tiles {
  std::vector<Group> groups;
  std::vector<int64_t> lengths;
};
Tiles tiles_of(const Group& group, int64_t n, int64_t tiles);

// On one rank of a group: x [tokens, dim], chosen and weights [tokens, k] -> [tokens, dim]. Tiles set out one after the other and are
// computed as they come; so do gradients. Each expert's product is one of a tile's rows. `beside`: when all have set out.
at::Tensor mix_in_tiles(const Group& group, const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights, const Weights& w,
                        int64_t tiles, bool finite, std::string_view layer, const Wire& rows_as, const Wire& results_as,
                        Mailbox* mailbox = nullptr, const Beside& beside = [] {});

// -- How ------------------------------------------------------------------------------------------------------------------

// Where tile i begins among n tokens.
inline int64_t tile_begin(int64_t n, int64_t i, int64_t tiles) { return n * i / tiles; }

inline Group tile_of(const Group& group, int64_t i, int64_t tiles) {
  Group tile{group.mesh, group.first_expert, {}};
  for (const auto& runs : group.tokens) {
    int64_t n = 0, at = 0;
    for (const auto& run : runs) n += run.length();
    const auto begin = tile_begin(n, i, tiles), end = tile_begin(n, i + 1, tiles);
    auto& part = tile.tokens.emplace_back();
    for (const auto& run : runs) {
      const auto from = std::max(begin, at), to = std::min(end, at + run.length());
      if (from < to) part.push_back({run.begin + from - at, run.begin + to - at});
      at += run.length();
    }
  }
  return tile;
}

inline Tiles tiles_of(const Group& group, int64_t n, int64_t tiles) {
  Tiles result;
  for (int64_t i = 0; i < tiles; ++i) {
    result.groups.push_back(tile_of(group, i, tiles));
    result.lengths.push_back(tile_begin(n, i + 1, tiles) - tile_begin(n, i, tiles));
  }
  return result;
}

inline at::Tensor mix_in_tiles(const Group& group, const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights,
                               const Weights& w, int64_t tiles, bool finite, std::string_view layer, const Wire& rows_as,
                               const Wire& results_as, Mailbox* mailbox, const Beside& beside) {
  const auto [groups, lengths] = tiles_of(group, x.size(0), tiles);
  const auto tokens = x.split_with_sizes(lengths), choices = chosen.split_with_sizes(lengths), factors = weights.split_with_sizes(lengths);
  std::vector<Rows> rows;
  std::deque<PendingTensor> counts;
  for (int64_t i = 0; i < tiles; ++i) {
    rows.push_back(sorted_rows(choices[i], group.first_expert.back()));
    counts.push_back(Exchange::start_counts(groups[i], rows[i], finite));
  }
  std::deque<Exchange> exchanges;
  std::vector<RowsUnderWay> there, back;
  for (int64_t i = 0; i < tiles; ++i) {
    exchanges.emplace_back(groups[i], rows[i], std::move(counts[i]), layer, mailbox);
    there.push_back(exchanges[i].start_to_experts(tokens[i], rows[i], rows_as));
  }
  beside();
  for (int64_t i = 0; i < tiles; ++i) {
    const auto computed = feed_forward(exchanges[i].at_experts(there[i]), exchanges[i].counts(), w);
    back.push_back(exchanges[i].start_to_tokens(computed, results_as));
  }
  std::vector<at::Tensor> results;
  for (int64_t i = 0; i < tiles; ++i) results.push_back(weighted_sums(back[i].arrive(), factors[i], rows[i]));
  return at::cat(results);
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
