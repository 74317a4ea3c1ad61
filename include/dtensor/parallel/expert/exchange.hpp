// Rows from the ranks that have the tokens to those that have the experts, and back, in exact numbers.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/parallel/expert/rows.hpp>
#include <dtensor/parallel/expert/under_way.hpp>

#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
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
  // group where that of one is not, naming `layer`.
  Exchange(const Group& group, const Rows& rows, bool finite, std::string_view layer)
      : Exchange(group, rows, start_counts(group, rows, finite), layer) {}

  // The same in two parts: other work may go on between them.
  static PendingTensor start_counts(const Group& group, const Rows& rows, bool finite);
  Exchange(const Group& group, const Rows& rows, PendingTensor counts, std::string_view layer);

  // This rank's rows, sorted by expert -> the rows of this rank's experts, sorted by expert and, within one, in the order of all tokens.
  // Communicates an all_to_all. Differentiable.
  at::Tensor to_experts(const at::Tensor& rows, const Wire& wire = kWires[0]) const;
  // Back again.
  at::Tensor to_tokens(const at::Tensor& rows, const Wire& wire = kWires[0]) const;

  // Both in two parts.
  RowsUnderWay start_to_experts(const at::Tensor& rows, const Wire& wire) const;
  at::Tensor at_experts(const RowsUnderWay& rows) const;
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
  void sort(std::vector<Segment> segments, const at::TensorOptions& options);

  const Group& group_;
  Lengths send_, recv_;
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

inline Exchange::Exchange(const Group& group, const Rows& rows, PendingTensor counts, std::string_view layer) : group_(group) {
  const auto ranks = static_cast<int64_t>(group.tokens.size()), columns = group.first_expert.back() + 1;
  const auto own = detail::group_of(group.mesh).rank();
  const auto heights = heights_of(group);
  const auto gathered = std::move(counts).wait();
  const auto all = gathered.is_meta() ? even_counts(rows.choices) : numbers_of(gathered);
  const auto count = [&](int64_t run, int64_t e) { return all[run * columns + e]; };

  send_.resize(ranks), recv_.resize(ranks);
  std::vector<Segment> segments;
  int64_t run = 0, at = 0;
  for (int64_t r = 0; r < ranks; run += heights[r++]) {
    for (int64_t i = 0; i < heights[r]; ++i) {
      require(count(run + i, columns - 1) == 0, "mix_experts",
              "{}: the routing is not finite on rank {}; hint: its logits or x hold NaN or infinity", layer, group.mesh.ranks()[r]);
    }
    for (auto e = group.first_expert[r]; e < group.first_expert[r + 1]; ++e) send_[r] += rows.counts[e];
    for (auto e = group.first_expert[own]; e < group.first_expert[own + 1]; ++e) {
      for (int64_t i = 0; i < heights[r]; ++i) {
        segments.push_back({e, group.tokens[r][i].begin, at, count(run + i, e)});
        at += segments.back().rows, recv_[r] += segments.back().rows;
      }
    }
  }
  counts_.resize(group.first_expert[own + 1] - group.first_expert[own]);
  for (const auto& segment : segments) counts_[segment.expert - group.first_expert[own]] += segment.rows;
  sort(std::move(segments), rows.slots.options());
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

inline RowsUnderWay Exchange::start_to_experts(const at::Tensor& rows, const Wire& wire) const {
  return {rows, group_.mesh, send_, recv_, wire};
}

inline at::Tensor Exchange::at_experts(const RowsUnderWay& rows) const {
  const auto received = rows.arrive();
  return order_.defined() ? reordered(received, order_, back_) : received;
}

inline RowsUnderWay Exchange::start_to_tokens(const at::Tensor& rows, const Wire& wire) const {
  return {back_.defined() ? reordered(rows, back_, order_) : rows, group_.mesh, recv_, send_, wire};
}

inline at::Tensor Exchange::to_experts(const at::Tensor& rows, const Wire& wire) const { return at_experts(start_to_experts(rows, wire)); }

inline at::Tensor Exchange::to_tokens(const at::Tensor& rows, const Wire& wire) const { return start_to_tokens(rows, wire).arrive(); }

}  // namespace dtensor::expert

#pragma GCC visibility pop
