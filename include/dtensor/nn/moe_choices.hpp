// Ways in which experts are chosen other than by a token's best scores: they choose tokens, or a token's number chooses them.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/custom_op.hpp>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// Each expert takes the `share` tokens of the global batch with the largest scores (Zhou et al., "Mixture-of-Experts with Expert Choice
// Routing", 2022), the first ones among equals: scores [..., experts] -> int64 [..., experts], e in column e where expert e takes the
// token and else -1. So a token may have no expert, or all. Ranks that share the tokens exchange their scores. Throws for a share below 1
// or above the tokens; of no tokens it is 0.
at::Tensor chosen_by_experts(const at::Tensor& scores, int64_t share);

// The experts of tokens by their numbers in the vocabulary alone (Roller et al., "Hash Layers for Large Sparse Models", 2021): ids int64
// [...] -> int64 [..., k], different ones, the same on any device. Throws for ids of another dtype and more choices than experts.
at::Tensor chosen_by_hash(const at::Tensor& ids, int64_t experts, int64_t k);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// On one device.
inline at::Tensor tokens_of_experts(const at::Tensor& scores, int64_t share) {
  const auto experts = scores.size(-1);
  const auto flat = scores.reshape({-1, experts});
  const auto best = std::get<1>(at::sort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/true)).narrow(0, 0, share);
  const auto options = best.options();
  const auto numbers = at::arange(experts, options).expand({share, experts});
  return at::full({flat.size(0), experts}, -1, options).scatter_(0, best, numbers).view(scores.sizes());
}

// Numbers below 2^31 - 1 that have nothing to do with each other: squares modulo a prime, so that int64 holds all products.
inline at::Tensor scrambled(const at::Tensor& ids, int64_t round) {
  constexpr int64_t kPrime = 2147483647, kFactor = 48271, kSecondFactor = 69621;
  const auto first = ids.remainder(kPrime).mul(kFactor).add(round + 1).remainder(kPrime);
  return first.mul(first).remainder(kPrime).mul(kSecondFactor).add(first).remainder(kPrime);
}

}  // namespace detail

inline at::Tensor chosen_by_experts(const at::Tensor& scores, int64_t share) {
  const auto tokens = scores.numel() / std::max<int64_t>(scores.size(-1), 1);
  require(share >= std::min<int64_t>(tokens, 1) && share <= tokens, "chosen_by_experts",
          "an expert is to take {} tokens of {}; expected 1 or more, and no more than that", share, tokens);
  const c10::NoGradGuard no_grad;
  const auto choose = [share](const at::Tensor& all) { return detail::tokens_of_experts(all, share); };
  const auto* layout = find_layout(scores);
  if (!layout) return choose(scores.detach());
  const Placements whole(layout->mesh().ndim(), replicate());
  const LocalMapOptions known{.out_sizes = {scores.sizes().vec()}};
  return redistribute(local_map(choose, layout->mesh(), {whole}, {whole}, known)(scores.detach()), layout->placements());
}

inline at::Tensor chosen_by_hash(const at::Tensor& ids, int64_t experts, int64_t k) {
  require(ids.scalar_type() == at::kLong, "chosen_by_hash", "tokens are numbered by int64; got {}", c10::toString(ids.scalar_type()));
  require(k >= 1 && k <= experts, "chosen_by_hash", "a token is to choose {} experts among {}", k, experts);
  std::vector<at::Tensor> chosen;
  for (int64_t j = 0; j < k; ++j) {
    auto next = detail::scrambled(ids, j).remainder(experts - j);  // among those that are left
    if (j > 0) {
      const auto taken = std::get<0>(at::stack(chosen, -1).sort(-1));
      for (int64_t i = 0; i < j; ++i) next = next + next.ge(taken.select(-1, i)).to(at::kLong);
    }
    chosen.push_back(next);
  }
  return at::stack(chosen, -1);
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
