// Tokens to the ranks that have any of their experts, each once, and their sums back (as DeepEP does: DeepSeek-AI, 2025).
#pragma once

#include <dtensor/parallel/expert/exchange.hpp>

#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>

#pragma GCC visibility push(default)

namespace dtensor::expert {

class TokenExchange {
 public:
  // `chosen`, int64 [tokens, k]: this rank's. Exchanges how many tokens go from where to where, and then their experts: an all_to_all each.
  // `finite` and `layer`: see Exchange.
  TokenExchange(const Group& group, const at::Tensor& chosen, bool finite, std::string_view layer);

  // [tokens, n], of this rank -> [received tokens, n], in the order of all tokens. Communicates an all_to_all. Differentiable.
  RowsUnderWay start_to_experts(const at::Tensor& x, const Wire& wire = kWires[0]) const;
  at::Tensor at_experts(const RowsUnderWay& rows) const;
  // [received tokens, n] -> [tokens, n]: the sums of what ranks give for a token, in the order of ranks.
  RowsUnderWay start_to_tokens(const at::Tensor& x, const Wire& wire) const;
  at::Tensor at_tokens(const RowsUnderWay& rows) const;

  // The received tokens' experts among this rank's own, int64 [received tokens, k]; -1: one of another rank.
  const at::Tensor& chosen() const { return chosen_; }

 private:
  void agree(bool finite, std::string_view layer);
  void take_experts(const at::Tensor& chosen);

  const Group& group_;
  Rows rows_;  // a row for each rank that has any of a token's experts, sorted by rank
  int64_t tokens_ = 0;
  Lengths send_, recv_;
  at::Tensor chosen_, order_, back_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline TokenExchange::TokenExchange(const Group& group, const at::Tensor& chosen, bool finite, std::string_view layer)
    : group_(group), tokens_(chosen.size(0)) {
  const auto ranks = static_cast<int64_t>(group.tokens.size()), experts = group.first_expert.back();
  require(!chosen.is_meta(), "mix_experts", "{}: a dry run has no choices, so nobody knows how many tokens go where; hint: .dispatch "
          "alltoall, which takes experts for equally busy", layer);
  require(chosen.numel() == 0 || (chosen.max().item<int64_t>() < experts && chosen.min().item<int64_t>() >= -1), "mix_experts",
          "a token chose an expert that there is not; expected numbers below {}, or -1 for none", experts);
  // Ranks from 1 on, and 0 for no expert.
  const auto ends = at::tensor(std::vector<int64_t>(group.first_expert.begin() + 1, group.first_expert.end()), at::kLong);
  const auto owner = at::searchsorted(ends.to(chosen.device()), chosen.contiguous(), /*out_int32=*/false, /*right=*/true).add(1);
  const auto wanted = at::zeros({tokens_, ranks + 1}, chosen.options()).scatter_(1, owner.masked_fill(chosen.lt(0), 0), 1);
  const auto pairs = wanted.narrow(1, 1, ranks).t().nonzero();  // (rank, token), sorted
  rows_.tokens = pairs.select(1, 1);
  rows_.slots = rows_.tokens.mul(ranks).add(pairs.select(1, 0));
  rows_.choices = ranks;
  send_ = numbers_of(wanted.narrow(1, 1, ranks).sum(0));
  agree(finite, layer);
  take_experts(chosen);
}

// A length below 0 says that the sender's routing is not finite.
inline void TokenExchange::agree(bool finite, std::string_view layer) {
  auto& ranks = dtensor::detail::group_of(group_.mesh);
  const auto numbers = at::tensor(send_, at::kLong).mul(2).add(finite ? 0 : 1).to(c10::Device(group_.mesh.device_type()));
  const Lengths one(ranks.size(), 1);
  recv_ = numbers_of(all_to_all(numbers, group_.mesh, one, one));
  for (int r = 0; r < ranks.size(); ++r) {
    require(recv_[r] % 2 == 0, "mix_experts", "{}: the routing is not finite on rank {}; hint: its logits or x hold NaN or infinity", layer,
            group_.mesh.ranks()[r]);
    recv_[r] /= 2;
  }
}

// With each token go its experts and its place among all tokens.
inline void TokenExchange::take_experts(const at::Tensor& chosen) {
  const auto own = dtensor::detail::group_of(group_.mesh).rank();
  std::vector<int64_t> places;
  for (const auto& run : group_.tokens[own]) {
    for (auto t = run.begin; t < run.end; ++t) places.push_back(t);
  }
  const auto place = at::tensor(places, at::kLong).to(chosen.device()).unsqueeze(1);
  const auto told = all_to_all(at::cat({chosen, place}, 1).index_select(0, rows_.tokens), group_.mesh, send_, recv_);
  order_ = at::argsort(told.select(1, chosen.size(1)));
  back_ = at::argsort(order_);
  const auto all = told.narrow(1, 0, chosen.size(1)).index_select(0, order_);
  const auto first = group_.first_expert[own], end = group_.first_expert[own + 1];
  chosen_ = at::where(all.ge(first).logical_and(all.lt(end)), all.sub(first), -1);
}

inline RowsUnderWay TokenExchange::start_to_experts(const at::Tensor& x, const Wire& wire) const {
  return {take_rows(x, rows_), {group_.mesh, send_, recv_}, wire};
}

inline at::Tensor TokenExchange::at_experts(const RowsUnderWay& rows) const { return reordered(rows.arrive(), order_, back_); }

inline RowsUnderWay TokenExchange::start_to_tokens(const at::Tensor& x, const Wire& wire) const {
  return {reordered(x, back_, order_), {group_.mesh, recv_, send_}, wire};
}

inline at::Tensor TokenExchange::at_tokens(const RowsUnderWay& rows) const {
  return linear(
      rows.arrive(), [&](const at::Tensor& y) { return sums_of_rows(y, rows_, tokens_); },
      [tokens = rows_.tokens](const at::Tensor& gradient) { return selected(gradient, tokens); });
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
