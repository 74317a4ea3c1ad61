// Log-probabilities of chosen tokens, entropies and sums of squared probabilities, from logits, in one pass over pieces of rows.
//
//   auto [logp, entropy, sum_squares] = rl::token_statistics(logits, tokens, {.entropy = true});
#pragma once

#include <dtensor/rl/inputs.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct StatisticsOptions {
  double temperature = 1;  // logits are divided by it
  bool entropy = false;
  bool sum_squares = false;
  int64_t rows = 0;   // at a time, where that needs memory; 0: as many as have a million logits together
  bool check = true;  // that tokens are in the vocabulary, which waits for the device
};

// [...] in the logits' dtype, or in float32 where that is shorter.
struct TokenStatistics {
  at::Tensor logp;         // log p of the chosen token
  at::Tensor entropy;      // -sum p log p, in nats; undefined when not asked for
  at::Tensor sum_squares;  // sum p^2 (for optimal_token_baseline); undefined when not asked for
};

// With p = softmax(logits / temperature), of `logits` [..., vocabulary] (a floating-point dtype) and `tokens` int64 [...]. Differentiable
// in the logits, once. Besides the logits themselves it holds no tensor of their size in the forward pass; the backward pass makes their
// gradient, and no second one. A logit of -infinity is a token that cannot be chosen.
//
// Logits may be sharded in any dim. Where the vocabulary is, ranks exchange five numbers for each row, and no logits; sharded rows
// communicate nothing. (The check of tokens reduces two numbers.) Tokens are laid out as the logits are (plain ones count as equal on all
// ranks). Throws for other shapes and dtypes, for a temperature that is not positive, and for tokens outside of the vocabulary.
TokenStatistics token_statistics(const at::Tensor& logits, const at::Tensor& tokens, const StatisticsOptions& options = {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kStatistics = "rl::token_statistics";
inline constexpr double kImpossible = -1e30;  // in place of the logarithm of 0: 0 times it is 0, in float32 too

// This rank's rows and its part of the vocabulary.
struct LogitsPart {
  at::Tensor logits, tokens;         // [outer, inner, own vocabulary], [outer * inner]; plain
  int64_t begin = 0;                 // of the own vocabulary
  std::vector<int64_t> mesh_dims{};  // that cut the vocabulary
  std::optional<DeviceMesh> mesh{};
  Placements rows{};                          // of results
  std::vector<int64_t> sizes{}, own_sizes{};  // of results, and of this rank's part of them

  int64_t vocabulary() const { return logits.size(2); }
  int64_t inner() const { return logits.size(1); }
  at::Tensor reduced(const at::Tensor& x, ReduceOp op) const {
    return mesh_dims.empty() ? x : mesh->communicator(mesh_dims).all_reduce(x.contiguous(), op).get();
  }
  at::Tensor result(const at::Tensor& own) const {
    return mesh ? from_local(own.reshape(own_sizes), *mesh, rows, sizes).tensor() : own.reshape(sizes);
  }
};

// Rows of all ranks' vocabulary: log-sum-exp, entropy, sum of squares, chosen logit.
struct RowStatistics {
  at::Tensor lse, entropy, sum_squares, chosen;
};

struct RowGradients {
  at::Tensor logp, entropy, sum_squares;  // [rows], plain; undefined: 0
};

// Those of float32 and float64 on the CPU are computed row by row (src/rl/token_statistics.cpp), and need no memory besides.
bool has_rows_kernel(const LogitsPart& part);
at::Tensor sums_of_rows(const LogitsPart& part, double temperature);  // as own_sums()
at::Tensor gradient_of_rows(const LogitsPart& part, const RowStatistics& stats, const RowGradients& g, double temperature);

inline Placements placements_of_rows(const Layout& layout) {
  const auto all = layout.placements();
  Placements rows(all.begin(), all.end());
  for (auto& placement : rows) {
    if (placement.is_shard(layout.ndim() - 1)) placement = replicate();
  }
  return rows;
}

inline LogitsPart part_of(const at::Tensor& logits, const at::Tensor& tokens) {
  LogitsPart part;
  part.sizes.assign(tokens.sizes().begin(), tokens.sizes().end());
  auto own = logits.detach(), chosen = tokens;
  if (const auto* layout = find_layout(logits)) {
    const auto dim = layout->ndim() - 1;
    part.mesh = layout->mesh();
    part.rows = placements_of_rows(*layout);
    for (int64_t d = 0; d < part.mesh->ndim(); ++d) {
      if (layout->placements()[d].is_shard(dim)) part.mesh_dims.push_back(d);
    }
    const auto intervals = layout->intervals(dim, part.mesh->coordinate());
    part.begin = intervals.empty() ? 0 : intervals[0].begin;
    own = DTensor(own).to_local();
    chosen = distribute_tensor(tokens, *part.mesh, part.rows).to_local();
  }
  const NoSpmd plain;
  part.own_sizes.assign(chosen.sizes().begin(), chosen.sizes().end());
  part.tokens = chosen.reshape({-1});
  // logits[:, :-1] are taken by slices, since to flatten them would copy them.
  part.logits = own.dim() == 3 && !own.is_contiguous() ? own : own.reshape({1, part.tokens.size(0), own.size(-1)});
  return part;
}

// Calls f(first row, rows) for pieces, none of which crosses an outer index.
template <class F>
void for_pieces(const LogitsPart& part, const StatisticsOptions& options, F f) {
  const auto fitting = std::max<int64_t>(1, (int64_t(1) << 20) / std::max<int64_t>(1, part.vocabulary()));
  const auto step = options.rows > 0 ? options.rows : fitting;
  for (int64_t outer = 0; outer < part.logits.size(0); ++outer) {
    for (int64_t row = 0; row < part.inner(); row += step) f(outer * part.inner() + row, std::min(step, part.inner() - row));
  }
}

inline at::ScalarType statistics_dtype(const at::Tensor& logits) { return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// The rows of a piece, scaled.
inline at::Tensor piece_of(const LogitsPart& part, int64_t row, int64_t count, const StatisticsOptions& options) {
  return part.logits.select(0, row / part.inner())
      .narrow(0, row % part.inner(), count)
      .to(statistics_dtype(part.logits))
      .div(options.temperature);
}

// Of the chosen tokens: which of the own vocabulary, and whether it is own.
inline std::pair<at::Tensor, at::Tensor> own_tokens(const LogitsPart& part, int64_t row, int64_t count) {
  const auto index = part.tokens.narrow(0, row, count).sub(part.begin);
  const auto is_own = index.ge(0).logical_and(index.lt(part.vocabulary()));
  return {index.masked_fill(is_own.logical_not(), 0).unsqueeze(1), is_own};
}

// [5, rows]: the largest logit; of e = exp(logit - largest) the sums of e, e (logit - largest) and e^2; and the chosen logit, 0 if another
// rank has it.
inline at::Tensor own_sums(const LogitsPart& part, const StatisticsOptions& options) {
  if (has_rows_kernel(part)) return sums_of_rows(part, options.temperature);
  auto sums = at::zeros({5, part.tokens.size(0)}, part.logits.options().dtype(statistics_dtype(part.logits)));
  if (part.vocabulary() == 0) return sums;
  for_pieces(part, options, [&](int64_t row, int64_t count) {
    auto piece = piece_of(part, row, count, options);
    const auto [index, is_own] = own_tokens(part, row, count);
    auto to = sums.narrow(1, row, count);
    to[4].copy_(piece.gather(1, index).squeeze(1).masked_fill(is_own.logical_not(), 0));
    const auto largest = piece.amax(1, true);
    to[0].copy_(largest.squeeze(1));
    piece.sub_(largest).clamp_min_(kImpossible);
    auto e = piece.exp();
    to[1].copy_(e.sum(1));
    if (options.entropy) to[2].copy_(piece.mul_(e).sum(1));
    if (options.sum_squares) to[3].copy_(e.square_().sum(1));
  });
  return sums;
}

inline RowStatistics row_statistics(const LogitsPart& part, const StatisticsOptions& options) {
  const auto own = own_sums(part, options);
  auto [largest, total, weighted, squares, chosen] = std::tuple(own[0], own[1], own[2], own[3], own[4]);
  if (!part.mesh_dims.empty()) {
    const bool has_none = part.vocabulary() == 0;
    const auto all = part.reduced(has_none ? largest.add(kImpossible) : largest, ReduceOp::max);
    const auto lower = has_none ? largest.mul(0) : largest - all;
    const auto factor = lower.exp();
    const auto sums =
        part.reduced(at::stack({total * factor, factor * (weighted + total * lower), squares * factor.square(), chosen}), ReduceOp::sum);
    largest = all;
    std::tie(total, weighted, squares, chosen) = std::tuple(sums[0], sums[1], sums[2], sums[3]);
  }
  const auto log_total = total.log();
  return {largest + log_total, log_total - weighted / total, squares / total.square(), chosen};
}

inline at::Tensor gradient_of_logits(const LogitsPart& part, const RowStatistics& stats, const RowGradients& g,
                                     const StatisticsOptions& o) {
  if (has_rows_kernel(part)) return gradient_of_rows(part, stats, g, o.temperature);
  auto gradient = at::empty({part.tokens.size(0), part.vocabulary()}, part.logits.options());
  for_pieces(part, o, [&](int64_t row, int64_t count) {
    const auto of = [&](const at::Tensor& x) { return x.narrow(0, row, count).unsqueeze(1); };
    auto log_p = piece_of(part, row, count, o).sub_(of(stats.lse)).clamp_min_(kImpossible);
    const auto p = log_p.exp();
    // d logp = [chosen] - p, d entropy = -p (log p + entropy), d sum_squares = 2 p (p - sum_squares)
    auto factor = g.entropy.defined() ? log_p.add_(of(stats.entropy)).mul_(of(g.entropy)).neg_() : log_p.zero_();
    if (g.logp.defined()) factor.sub_(of(g.logp));
    if (g.sum_squares.defined()) factor.add_((p - of(stats.sum_squares)).mul_(of(g.sum_squares).mul(2)));
    factor.mul_(p);
    if (g.logp.defined() && part.vocabulary() > 0) {
      const auto [index, is_own] = own_tokens(part, row, count);
      factor.scatter_add_(1, index, of(g.logp).masked_fill(is_own.logical_not().unsqueeze(1), 0));
    }
    gradient.narrow(0, row, count).copy_(factor.div_(o.temperature));
  });
  return gradient;
}

class StatisticsFunction : public torch::autograd::Function<StatisticsFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& tokens,
                                                const StatisticsOptions& options) {
    const auto part = part_of(logits, tokens);
    const NoSpmd plain;
    const auto stats = row_statistics(part, options);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, tokens, stats.lse, stats.entropy, stats.sum_squares});
    ctx->saved_data["temperature"] = options.temperature;
    ctx->saved_data["entropy"] = options.entropy;
    ctx->saved_data["sum_squares"] = options.sum_squares;
    ctx->saved_data["rows"] = options.rows;
    torch::autograd::variable_list results{part.result(stats.chosen - stats.lse)};
    if (options.entropy) results.push_back(part.result(stats.entropy.clamp_min(0)));
    if (options.sum_squares) results.push_back(part.result(stats.sum_squares));
    return results;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const StatisticsOptions options{ctx->saved_data["temperature"].toDouble(), ctx->saved_data["entropy"].toBool(),
                                    ctx->saved_data["sum_squares"].toBool(), ctx->saved_data["rows"].toInt()};
    const auto part = part_of(saved[0], saved[1]);
    const auto own = [&](size_t i) -> at::Tensor {
      if (i >= gradients.size() || !gradients[i].defined()) return {};
      const auto& g = gradients[i];
      return (part.mesh ? distribute_tensor(g, *part.mesh, part.rows).to_local() : g).reshape({-1});
    };
    const RowGradients g{own(0), options.entropy ? own(1) : at::Tensor(),
                         options.sum_squares ? own(options.entropy ? 2 : 1) : at::Tensor()};
    const NoSpmd plain;
    auto gradient = gradient_of_logits(part, {saved[2], saved[3], saved[4], {}}, g, options);
    const auto* layout = find_layout(saved[0]);
    if (layout == nullptr) return {gradient.reshape(saved[0].sizes()), at::Tensor(), at::Tensor()};
    gradient = gradient.reshape(DTensor(saved[0].detach()).to_local().sizes());
    return {from_local(gradient, *part.mesh, layout->placements(), layout->sizes()).tensor(), at::Tensor(), at::Tensor()};
  }
};

inline void check_logits(const at::Tensor& logits, const at::Tensor& tokens, const StatisticsOptions& options) {
  require(logits.defined() && logits.dim() > 0 && logits.is_floating_point(), kStatistics,
          "got {} for the logits; expected [..., vocabulary] of a floating-point dtype", shape_of(logits));
  if (!tokens.defined() || tokens.sizes() != logits.sizes().slice(0, logits.dim() - 1))
    fail(kStatistics, "got tokens of {} for logits of {}; expected all dims but the last", shape_of(tokens), shape_of(logits));
  check_ids(kStatistics, "tokens", tokens);
  require(options.temperature > 0 && options.rows >= 0, kStatistics, "got a temperature of {} and {} rows at a time; expected {}",
          options.temperature, options.rows, "a positive number, and 0 or more");
  if (!options.check || tokens.numel() == 0) return;
  const auto least = full_tensor(tokens.amin()).item<int64_t>(), most = full_tensor(tokens.amax()).item<int64_t>();
  if (least < 0 || most >= logits.size(-1))
    fail(kStatistics, "got token {} for logits of {}; expected 0 to {}; hint: give padding any token, and mask it",
         least < 0 ? least : most, shape_of(logits), logits.size(-1) - 1);
}

// Under placements of which this rank's part can be computed: the vocabulary in one piece, and nothing Partial.
inline at::Tensor in_parts(const at::Tensor& logits) {
  const auto* layout = find_layout(logits);
  if (layout == nullptr) return logits;
  Placements placements(layout->placements().begin(), layout->placements().end());
  for (auto& placement : placements) {
    const bool is_plain_cut = placement.is_shard() && placement == shard(placement.dim);
    if (!placement.is_replicate() && !is_plain_cut) placement = replicate();
  }
  return redistribute(logits, placements);
}

}  // namespace detail

inline TokenStatistics token_statistics(const at::Tensor& logits, const at::Tensor& tokens, const StatisticsOptions& options) {
  detail::check_logits(logits, tokens, options);
  const auto results = detail::StatisticsFunction::apply(detail::in_parts(logits), tokens, options);
  TokenStatistics statistics{results[0], {}, {}};
  if (options.entropy) statistics.entropy = results[1];
  if (options.sum_squares) statistics.sum_squares = results.back();
  return statistics;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
