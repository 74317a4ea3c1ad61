// Passes of a model over the rows of a batch: in parts that fit, without padding where asked, and what it says of each token.
#pragma once

#include <dtensor/rl/balance.hpp>
#include <dtensor/rl/batch.hpp>
#include <dtensor/rl/entropy.hpp>
#include <dtensor/rl/options.hpp>
#include <dtensor/rl/shared_prompts.hpp>
#include <dtensor/rng/random.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Rows of a batch that go through a model together. Columns of [batch, time] end at the longest row.
struct Part {
  Batch batch;
  RowPrompts rows;

  int64_t time() const { return *std::ranges::max_element(rows.lengths); }
  // A column of [batch, time - 1], as rollout() makes them.
  at::Tensor tokens(const std::string& name) const { return batch.get(name).narrow(1, 0, time() - 1); }
};

// The rows of `mine`, a batch in a layout, in parts of which no rank has more than `tokens`; 0: in one. Part i has the i-th of each rank's
// rows, so nothing moves where ranks have as many. `prompts` are those of all rows. Throws for a row that is longer.
std::vector<Part> parts_of(const Batch& mine, const RowPrompts& prompts, int64_t tokens);

// The rows of `batch` of each minibatch: as many, or one less, in order, or shuffled by a seed. The same on every rank.
std::vector<Rows> minibatch_rows(int64_t rows, int64_t minibatches, bool shuffle, uint64_t seed);

// An order of rows in which minibatches of them, cut over `ranks`, are equal work; that of the batch where all lengths are equal.
Rows balanced_order(const std::vector<int64_t>& lengths, int64_t ranks);

// How rows go through a model: with their padding; packed; or packed, each prompt once. The last says nothing of the prompts' own tokens.
enum class RowForm { padded, packed, shared_prompts };

// What `forward` (ids [rows, time] -> logits [rows, time, vocabulary]) says of the tokens of a part: [rows, time - 1].
template <class Forward>
TokenStatistics score_tokens(Forward forward, const Part& part, RowForm form, const StatisticsOptions& options);

// What `forward` (ids [rows, time] -> [rows, time] or [rows, time, 1]) says before each token of a part: [rows, time - 1].
template <class Forward>
at::Tensor value_tokens(Forward forward, const Part& part, RowForm form);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline std::vector<int64_t> lengths_at(const std::vector<int64_t>& lengths, const Rows& rows) {
  std::vector<int64_t> chosen;
  for (const auto row : rows) chosen.push_back(lengths[row]);
  return chosen;
}

inline RowPrompts prompts_at(const RowPrompts& all, const Rows& rows) {
  const auto of = [&](const std::vector<int64_t>& list) { return list.empty() ? list : lengths_at(list, rows); };
  return {of(all.lengths), of(all.prompt_lengths), of(all.numbers)};
}

// Whether no rank has more tokens in a part.
inline bool fit(const std::vector<Rows>& parts, const std::vector<int64_t>& lengths, int64_t share, int64_t tokens) {
  for (const auto& rows : parts) {
    std::map<int64_t, int64_t> sums;
    for (const auto row : rows) sums[row / share] += lengths[row];
    for (const auto& [rank, sum] : sums) {
      if (sum > tokens) return false;
    }
  }
  return true;
}

}  // namespace detail

inline std::vector<Part> parts_of(const Batch& mine, const RowPrompts& prompts, int64_t tokens) {
  const auto count = mine.size();
  if (tokens == 0) return {{mine, prompts}};
  const auto& lengths = prompts.lengths;
  const auto longest = *std::ranges::max_element(lengths);
  require(longest <= tokens, "rl::parts_of", "a row has {} tokens; expected at most {}, those of a microbatch", longest, tokens);
  const auto ranks = detail::ranks_of(mine.layout()), share = (count + ranks - 1) / ranks;
  for (int64_t parts = 1; parts <= share; ++parts) {
    const auto rows = detail::cut_rows(count, ranks, parts);
    if (!detail::fit(rows, lengths, share, tokens)) continue;
    std::vector<Part> made;
    for (const auto& own : rows) made.push_back({mine.rows(own), detail::prompts_at(prompts, own)});
    return made;
  }
  fail("rl::parts_of", "no parts of {} rows were found", count);
}

inline std::vector<Rows> minibatch_rows(int64_t rows, int64_t minibatches, bool shuffle, uint64_t seed) {
  auto order = detail::numbers(0, rows);
  if (shuffle) {
    std::vector<double> keys;
    for (const auto row : order) keys.push_back(rng::uniform_at(seed, 0, row));
    std::ranges::stable_sort(order, {}, [&](int64_t row) { return keys[row]; });
  }
  std::vector<Rows> all;
  for (int64_t i = 0; i < minibatches; ++i) {
    all.emplace_back(order.begin() + detail::begin_of(i, minibatches, rows), order.begin() + detail::begin_of(i + 1, minibatches, rows));
  }
  return all;
}

inline Rows balanced_order(const std::vector<int64_t>& lengths, int64_t ranks) {
  const auto count = static_cast<int64_t>(lengths.size());
  if (ranks == 1 || count % ranks != 0 || std::ranges::count(lengths, lengths[0]) == count) return detail::numbers(0, count);
  Rows order;
  for (const auto& part : balance(lengths, ranks, {.equal_counts = true})) order.insert(order.end(), part.begin(), part.end());
  return order;
}

namespace detail {

inline TokenStatistics map_statistics(const TokenStatistics& of, const std::function<at::Tensor(const at::Tensor&)>& f) {
  const auto map = [&](const at::Tensor& x) { return x.defined() ? f(x) : x; };
  return {map(of.logp), map(of.entropy), map(of.sum_squares)};
}

}  // namespace detail

template <class Forward>
TokenStatistics score_tokens(Forward forward, const Part& part, RowForm form, const StatisticsOptions& options) {
  const auto time = part.time();
  const auto ids = part.batch.get("ids").narrow(1, 0, time);
  if (form == RowForm::padded) return token_statistics(forward(ids.narrow(1, 0, time - 1)), ids.narrow(1, 1, time - 1), options);
  if (form == RowForm::shared_prompts) {
    const auto shared = share_prompts(ids, part.rows);
    const auto found = token_statistics(shared.scores_of(forward), shared.targets, options);
    return detail::map_statistics(found, [&](const at::Tensor& x) { return shared.unpack(x); });
  }
  const auto packed = rl::pack(ids, part.rows.lengths);
  at::Tensor logits;
  {
    const PackedRows region(packed);
    logits = forward(packed.ids);
  }
  const auto found = token_statistics(logits, packed.targets, options);
  return detail::map_statistics(found, [&](const at::Tensor& x) { return packed.unpack(x).narrow(1, 0, time - 1); });
}

template <class Forward>
at::Tensor value_tokens(Forward forward, const Part& part, RowForm form) {
  const auto time = part.time();
  const auto ids = part.batch.get("ids").narrow(1, 0, time);
  const auto flat = [](const at::Tensor& x) { return x.dim() == 3 ? x.squeeze(2) : x; };
  if (form == RowForm::padded) return flat(forward(ids.narrow(1, 0, time - 1)));
  if (form == RowForm::shared_prompts) {
    const auto shared = share_prompts(ids, part.rows);
    return shared.unpack(flat(shared.scores_of(forward)));
  }
  const auto packed = rl::pack(ids, part.rows.lengths);
  at::Tensor values;
  {
    const PackedRows region(packed);
    values = flat(forward(packed.ids));
  }
  return packed.unpack(values).narrow(1, 0, time - 1);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
