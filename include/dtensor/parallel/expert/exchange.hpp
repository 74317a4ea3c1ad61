// Rows from the ranks that have the tokens to those that have the experts, and back, in exact numbers.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/parallel/expert/rows.hpp>
#include <dtensor/parallel/expert/under_way.hpp>

#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// What all ranks of a group know beforehand.
struct Group {
  DeviceMesh mesh;                      // its ranks
  std::vector<int64_t> first_expert;    // of each rank and, last, the number of experts
  std::vector<Intervals> tokens;        // of each rank: where its tokens are among all tokens, in runs
};

class Exchange {
 public:
  // Exchanges how many rows go from where to where: one all_gather. `finite`: whether this rank's routing is; throws on every rank of the
  // group where that of one is not, naming `layer`. `mailbox`: rows are put there; null: they are sent.
  Exchange(const Group& group, const Rows& rows, bool finite, std::string_view layer, Mailbox* mailbox = nullptr)
      : Exchange(group, rows, start_counts(group, rows, finite), layer, mailbox) {}

  // The same in two parts: other work may go on between them.
  static PendingTensor start_counts(const Group& group, const Rows& rows, bool finite);
  Exchange(const Group& group, const Rows& rows, PendingTensor counts, std::string_view layer, Mailbox* mailbox = nullptr);

  // This rank's tokens x and their rows, sorted by expert -> the rows of this rank's experts, sorted by expert and, within one, in the
  // order of all tokens. Communicates an all_to_all. Differentiable.
  RowsUnderWay start_to_experts(const at::Tensor& x, const Rows& rows, const Wire& wire) const;
  at::Tensor at_experts(const RowsUnderWay& rows) const;
  // Back again: those that arrive are in the order of `rows` above.
  RowsUnderWay start_to_tokens(const at::Tensor& rows, const Wire& wire) const;

  // Rows of each of this rank's experts.
  const std::vector<int64_t>& counts() const { return counts_; }

 private:
  // So many rows of one expert from one run of one rank's tokens.
  struct Segment {
    int64_t expert, token;  // where its run begins
    int64_t at, rows;       // among those received
  };
  static at::Tensor counts_by_run(const Group& group, const Rows& rows, bool finite);
  static Lengths heights_of(const Group& group);  // runs of each rank
  std::vector<int64_t> even_counts(int64_t choices) const;
  // In a mailbox, from the counts of all runs.
  void find_places(const std::vector<int64_t>& counts);
  void sort(std::vector<Segment> segments, const at::TensorOptions& options);

  const Group& group_;
  Route route_;
  std::vector<int64_t> counts_;
  at::Tensor order_, back_;  // int64: of the received rows; undefined: as they came
};

// -- How ------------------------------------------------------------------------------------------------------------------

// Of this rank: [runs, experts + 1]; last, whether the run's routing is not finite.
inline at::Tensor Exchange::counts_by_run(const Group& group, const Rows& rows, bool finite) {
  const auto& runs = group.tokens[detail::group_of(group.mesh).rank()];
  const auto columns = group.first_expert.back() + 1, height = static_cast<int64_t>(runs.size());
  std::vector<int64_t> lengths;
  for (const auto& run : runs) lengths.push_back(run.length());
  if (rows.slots.is_meta()) return at::empty({height, columns}, rows.slots.options());
  const auto device = rows.slots.device();
  if (height == 1) {
    auto counts = rows.counts;
    counts.push_back(finite ? 0 : 1);
    return at::tensor(counts, at::kLong).to(device).view({1, columns});
  }
  const auto run_of = at::repeat_interleave(at::tensor(lengths, at::kLong).to(device)).index_select(0, rows.tokens);
  const auto counts = at::bincount(run_of.mul(columns).add(rows.experts), {}, height * columns).view({height, columns});
  counts.select(1, columns - 1).fill_(finite ? 0 : 1);
  return counts;
}

// Of all runs, for a dry run: a rank's rows are said to be of its first one.
inline std::vector<int64_t> Exchange::even_counts(int64_t choices) const {
  const auto experts = group_.first_expert.back();
  std::vector<int64_t> all;
  for (const auto& runs : group_.tokens) {
    int64_t rows = 0;
    for (const auto& run : runs) rows += run.length() * choices;
    for (size_t i = 0; i < runs.size(); ++i) {
      for (int64_t e = 0; e < experts; ++e) all.push_back(i == 0 ? even_share(rows, e, experts) : 0);
      all.push_back(0);
    }
  }
  return all;
}

inline Lengths Exchange::heights_of(const Group& group) {
  Lengths heights;
  for (const auto& runs : group.tokens) heights.push_back(static_cast<int64_t>(runs.size()));
  return heights;
}

inline PendingTensor Exchange::start_counts(const Group& group, const Rows& rows, bool finite) {
  return start_all_gather(counts_by_run(group, rows, finite), group.mesh, {0, heights_of(group)});
}

inline Exchange::Exchange(const Group& group, const Rows& rows, PendingTensor counts, std::string_view layer, Mailbox* mailbox)
    : group_(group), route_{group.mesh, {}, {}, mailbox} {
  const auto ranks = static_cast<int64_t>(group.tokens.size()), columns = group.first_expert.back() + 1;
  const auto own = detail::group_of(group.mesh).rank();
  const auto heights = heights_of(group);
  const auto gathered = std::move(counts).wait();
  const auto all = gathered.is_meta() ? even_counts(rows.choices) : numbers_of(gathered);
  const auto count = [&](int64_t run, int64_t e) { return all[run * columns + e]; };

  route_.send.resize(ranks), route_.recv.resize(ranks);
  std::vector<Segment> segments;
  int64_t run = 0, at = 0;
  for (int64_t r = 0; r < ranks; run += heights[r++]) {
    for (int64_t i = 0; i < heights[r]; ++i) {
      require(count(run + i, columns - 1) == 0, "mix_experts",
              "{}: the routing is not finite on rank {}; hint: its logits or x hold NaN or infinity", layer, group.mesh.ranks()[r]);
    }
    for (auto e = group.first_expert[r]; e < group.first_expert[r + 1]; ++e) route_.send[r] += rows.counts[e];
    for (auto e = group.first_expert[own]; e < group.first_expert[own + 1]; ++e) {
      for (int64_t i = 0; i < heights[r]; ++i) {
        segments.push_back({e, group.tokens[r][i].begin, at, count(run + i, e)});
        at += segments.back().rows, route_.recv[r] += segments.back().rows;
      }
    }
  }
  counts_.resize(group.first_expert[own + 1] - group.first_expert[own]);
  for (const auto& segment : segments) counts_[segment.expert - group.first_expert[own]] += segment.rows;
  sort(std::move(segments), rows.slots.options());
  if (mailbox) find_places(all);
}

inline void Exchange::find_places(const std::vector<int64_t>& counts) {
  const auto ranks = static_cast<int64_t>(group_.tokens.size()), columns = group_.first_expert.back() + 1;
  const auto own = detail::group_of(group_.mesh).rank();
  const auto heights = heights_of(group_);
  std::vector<Lengths> sent(ranks, Lengths(ranks));  // from rank, to rank
  const auto* run = counts.data();
  for (int64_t from = 0; from < ranks; ++from) {
    for (int64_t i = 0; i < heights[from]; ++i, run += columns) {
      for (int64_t to = 0; to < ranks; ++to) {
        sent[from][to] += std::accumulate(run + group_.first_expert[to], run + group_.first_expert[to + 1], int64_t{0});
      }
    }
  }
  route_.before_sent.resize(ranks), route_.before_returned.resize(ranks);
  for (int64_t r = 0; r < ranks; ++r) {
    int64_t in = 0, out = 0;
    for (int64_t other = 0; other < ranks; ++other) {
      if (other < own) route_.before_sent[r] += sent[other][r], route_.before_returned[r] += sent[r][other];
      in += sent[other][r], out += sent[r][other];
    }
    route_.most = std::max({route_.most, in, out});
  }
}

inline void Exchange::sort(std::vector<Segment> segments, const at::TensorOptions& options) {
  std::erase_if(segments, [](const Segment& s) { return s.rows == 0; });
  const auto before = [](const Segment& a, const Segment& b) { return std::pair(a.expert, a.token) < std::pair(b.expert, b.token); };
  if (std::ranges::is_sorted(segments, before)) return;
  std::ranges::sort(segments, before);
  std::vector<int64_t> order;
  for (const auto& segment : segments) {
    for (int64_t i = 0; i < segment.rows; ++i) order.push_back(segment.at + i);
  }
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[order[i]] = static_cast<int64_t>(i);
  order_ = at::tensor(order, at::kLong).to(options.device());
  back_ = at::tensor(back, at::kLong).to(options.device());
}

inline at::Tensor reordered(const at::Tensor& rows, const at::Tensor& order, const at::Tensor& back) {
  return linear(
      rows, [&](const at::Tensor& x) { return selected(x, order); },
      [back](const at::Tensor& gradient) { return selected(gradient, back); });
}

inline RowsUnderWay Exchange::start_to_experts(const at::Tensor& x, const Rows& rows, const Wire& wire) const {
  return {x, route_, wire, rows.tokens, [rows, tokens = x.size(0)](const at::Tensor& g) { return sums_of_rows(g, rows, tokens); }};
}

inline at::Tensor Exchange::at_experts(const RowsUnderWay& rows) const { return rows.arrive({order_, back_}); }

inline RowsUnderWay Exchange::start_to_tokens(const at::Tensor& rows, const Wire& wire) const {
  if (!back_.defined()) return {rows, route_.back(), wire};
  return {rows, route_.back(), wire, back_, [order = order_](const at::Tensor& g) { return selected(g, order); }};
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
