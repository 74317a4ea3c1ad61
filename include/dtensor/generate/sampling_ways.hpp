// How a model's scores become a distribution and a token, see sampling.hpp: the definition, and ways that give the same to the bit from
// fewer tokens.
//
// A weight is exp((score - largest) / temperature). The definition orders all tokens by weight where a cut wants them ordered. The ways
// find a few that must be among the first, and order those. Where a sum is compared with a limit, the definition's has been rounded in
// another order. So a way answers only where the two are further apart than both roundings can be, and else the definition does.
#pragma once

#include <dtensor/generate/sampling.hpp>

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::generate {

namespace detail {

constexpr double kForbidden = -std::numeric_limits<double>::infinity();

inline void forbid_bad_words(std::vector<double>& scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt) {
  const auto output = tokens.subspan(prompt);
  for (const auto& word : settings.bad_words) {
    const auto begin = word.size() - 1;
    if (begin <= output.size() && std::ranges::equal(output.last(begin), std::span(word).first(begin))) scores[word.back()] = kForbidden;
  }
}

inline void penalize(std::vector<double>& scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt) {
  if (settings.repetition_penalty != 1) {
    std::vector<bool> seen(scores.size());
    for (const auto token : tokens) {
      if (seen[token]) continue;
      seen[token] = true;
      auto& score = scores[token];
      score = score > 0 ? score / settings.repetition_penalty : score * settings.repetition_penalty;
    }
  }
  if (settings.presence_penalty == 0 && settings.frequency_penalty == 0) return;
  std::map<int64_t, int64_t> counts;
  for (const auto token : tokens.subspan(prompt)) ++counts[token];
  for (const auto& [token, count] : counts) {
    scores[token] -= settings.presence_penalty + settings.frequency_penalty * static_cast<double>(count);
  }
}

// Throws for scores that are NaN or infinite. Returns where the largest is.
template <class T>
size_t largest_of(std::span<const T> scores, size_t tokens) {
  size_t best = 0;
  bool is_bad = false;
  for (size_t i = 0; i < scores.size(); ++i) {
    is_bad |= !(scores[i] < std::numeric_limits<T>::infinity());
    if (scores[i] > scores[best]) best = i;
  }
  for (size_t i = 0; is_bad && i < scores.size(); ++i) {
    if (!(scores[i] < std::numeric_limits<T>::infinity()))
      fail("generate", "the model's scores after {} tokens have {}", tokens, std::isnan(scores[i]) ? "NaN" : "infinity");
  }
  return best;
}

inline bool changes_scores(const Settings& s, int64_t output) {
  return s.allowed || !s.bad_words.empty() || !s.logit_bias.empty() || s.repetition_penalty != 1 || s.presence_penalty != 0 ||
         s.frequency_penalty != 0 || (output < s.min_tokens && !s.stop_tokens.empty());
}

// A copy of the scores, with all that comes before the temperature.
template <class T>
std::vector<double> changed_scores(std::span<const T> from, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt) {
  std::vector<double> scores(from.begin(), from.end());
  forbid_bad_words(scores, settings, tokens, prompt);
  if (static_cast<int64_t>(tokens.size()) - prompt < settings.min_tokens) {
    for (const auto token : settings.stop_tokens) scores[token] = kForbidden;
  }
  if (settings.allowed) {
    std::vector<bool> allowed(scores.size(), true);
    settings.allowed(tokens, allowed);
    require(allowed.size() == scores.size(), "generate", "the callback for allowed tokens made a list of {}; expected {}", allowed.size(),
            scores.size());
    for (size_t token = 0; token < scores.size(); ++token) {
      if (!allowed[token]) scores[token] = kForbidden;
    }
  }
  for (const auto& [token, bias] : settings.logit_bias) scores[token] += bias;
  penalize(scores, settings, tokens, prompt);
  return scores;
}

using Entries = std::vector<Distribution::Entry>;

// Scores, as changed, and weights of tokens. `best` is the first of the largest.
template <class T>
struct Weights {
  std::span<const T> scores;
  size_t best;
  double temperature;

  Weights(std::span<const T> of, size_t largest, const Settings& settings, size_t tokens)
      : scores(of), best(largest), temperature(settings.temperature) {
    if (static_cast<double>(scores[best]) == kForbidden)
      fail("generate", "no token is allowed after {} tokens; hint: see allowed, bad_words, logit_bias", tokens);
  }

  size_t size() const { return scores.size(); }
  double exponent(size_t token) const { return (static_cast<double>(scores[token]) - static_cast<double>(scores[best])) / temperature; }
  double weight(size_t token) const { return std::exp(exponent(token)); }
  // 0 for weights that are less than a rounding, all of them together.
  double quick_weight(size_t token) const {
    const auto x = exponent(token);
    return x < kLeastExponent ? 0 : std::exp(x);
  }
  // How far sums of so many weights can be from each other that are rounded in other orders, and lack the smallest, as a share of the sum.
  double margin() const { return 1e-15 * static_cast<double>(size() + 16); }

  static constexpr double kLeastExponent = -45;
};

// Calls `f` with the weights of these scores.
template <class T, class F>
auto with_weights(std::span<const T> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt, const F& f) {
  const auto largest = largest_of(scores, tokens.size());
  const auto output = static_cast<int64_t>(tokens.size()) - prompt;
  if (!changes_scores(settings, output)) return f(Weights<T>(scores, largest, settings, tokens.size()));
  const auto changed = changed_scores(scores, settings, tokens, prompt);
  const auto best = static_cast<size_t>(std::ranges::max_element(changed) - changed.begin());
  return f(Weights<double>(changed, best, settings, tokens.size()));
}

// -- The definition -------------------------------------------------------------------------------------------------------

inline bool before(const Distribution::Entry& a, const Distribution::Entry& b) {
  return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
}

inline double sum_of(const Entries& entries) {
  double sum = 0;
  for (const auto& entry : entries) sum += entry.probability;
  return sum;
}

// The first of a sorted list that have `share` of the sum together.
inline void keep_share(Entries& entries, double share) {
  const auto limit = share * sum_of(entries);
  double sum = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    sum += entries[i].probability;
    if (sum >= limit) return entries.resize(i + 1);
  }
}

inline void keep_typical(Entries& entries, double share) {
  const auto sum = sum_of(entries);
  double entropy = 0;
  for (const auto& entry : entries) {
    if (entry.probability > 0) entropy -= entry.probability / sum * std::log(entry.probability / sum);
  }
  const auto distance = [&](const Distribution::Entry& entry) { return std::abs(entropy + std::log(entry.probability / sum)); };
  std::ranges::sort(entries, [&](const auto& a, const auto& b) {
    const auto x = distance(a), y = distance(b);
    return x != y ? x < y : before(a, b);
  });
  keep_share(entries, share);
}

// Those cuts that take ordered tokens.
inline void cut_ordered(Entries& entries, double top_p, double min_p, double typical) {
  if (top_p < 1) keep_share(entries, top_p);
  if (min_p > 0) {
    const auto least = entries[0].probability * min_p;
    std::erase_if(entries, [&](const auto& entry) { return entry.probability < least; });
  }
  if (typical < 1) keep_typical(entries, typical);
}

template <class T>
Entries entries_by_definition(const Weights<T>& weights, const Settings& settings) {
  Entries entries;
  entries.reserve(weights.size());
  for (size_t token = 0; token < weights.size(); ++token) {
    if (weights.scores[token] != kForbidden) entries.push_back({static_cast<int64_t>(token), weights.weight(token)});
  }
  const bool is_top_k = settings.top_k > 0 && settings.top_k < static_cast<int64_t>(entries.size());
  if (is_top_k || settings.top_p < 1 || settings.min_p > 0) std::ranges::sort(entries, before);
  if (is_top_k) entries.resize(settings.top_k);
  cut_ordered(entries, settings.top_p, settings.min_p, settings.typical);
  return entries;
}

template <class T>
Entries greedy_entry(const Weights<T>& weights) {
  return {{static_cast<int64_t>(weights.best), 1}};
}

inline Entries normalized(Entries entries) {
  const auto sum = sum_of(entries);
  for (auto& entry : entries) entry.probability /= sum;
  return entries;
}

// -- Ways -----------------------------------------------------------------------------------------------------------------

// The `count` of most weight, in order. Nothing where these are too many, or weights too small to tell.
template <class T>
std::optional<Entries> first_entries(const Weights<T>& weights, int64_t count) {
  if (count > static_cast<int64_t>(weights.size()) / 4) return {};
  std::vector<T> largest(weights.scores.begin(), weights.scores.begin() + count);  // a heap, the smallest in front
  std::ranges::make_heap(largest, std::greater());
  for (const auto score : weights.scores.subspan(count)) {
    if (score <= largest.front()) continue;
    std::ranges::pop_heap(largest, std::greater());
    largest.back() = score;
    std::ranges::push_heap(largest, std::greater());
  }
  const auto best = static_cast<double>(weights.scores[weights.best]), last = static_cast<double>(largest.front());
  if (!((last - best) / weights.temperature > -700)) return {};
  // Scores that are closer than this may have equal weights.
  const auto least = last - 1e-12 * (weights.temperature + std::abs(last) + std::abs(best));
  Entries entries;
  for (size_t token = 0; token < weights.size(); ++token) {
    if (weights.scores[token] >= least) entries.push_back({static_cast<int64_t>(token), weights.weight(token)});
  }
  std::ranges::partial_sort(entries, entries.begin() + count, before);
  entries.resize(count);
  return entries;
}

// Orders tokens, and leaves some out that come after those which have `enough` together: mostly few have it.
inline void keep_first_with(Entries& entries, double enough) {
  for (size_t count = 64;; count *= 8) {
    if (count < entries.size()) {
      std::ranges::nth_element(entries, entries.begin() + static_cast<int64_t>(count), before);
      double sum = 0;
      for (size_t i = 0; i < count; ++i) sum += entries[i].probability;
      if (sum < enough) continue;
      entries.resize(count);
    }
    break;
  }
  std::ranges::sort(entries, before);
}

// The fewest of most weight, in order, that have `share` of the sum. A token that is needed has at least its part of what is left out.
template <class T>
std::optional<Entries> share_entries(const Weights<T>& weights, double share) {
  std::vector<double> all(weights.size());
  double sum = 0;
  for (size_t token = 0; token < all.size(); ++token) sum += all[token] = weights.quick_weight(token);
  const auto margin = weights.margin();
  const auto least = (1 - share - 2 * margin) / static_cast<double>(all.size()) * sum;
  if (!(least > 2 * std::exp(Weights<T>::kLeastExponent))) return {};
  Entries entries;
  for (size_t token = 0; token < all.size(); ++token) {
    if (all[token] >= least) entries.push_back({static_cast<int64_t>(token), all[token]});
  }
  keep_first_with(entries, (share + 2 * margin) * sum);
  double so_far = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    so_far += entries[i].probability;
    if (so_far <= (share - margin) * sum) continue;
    if (so_far < (share + margin) * sum) return {};
    entries.resize(i + 1);
    return entries;
  }
  return {};
}

// Those with at least `part` of the largest weight, which is 1, in order.
template <class T>
Entries entries_from(const Weights<T>& weights, double part) {
  const auto least = std::log(part) - 1e-9;
  Entries entries;
  for (size_t token = 0; token < weights.size(); ++token) {
    if (weights.exponent(token) < least) continue;
    const auto weight = weights.weight(token);
    if (weight >= part) entries.push_back({static_cast<int64_t>(token), weight});
  }
  std::ranges::sort(entries, before);
  return entries;
}

template <class T>
Entries entries_of(const Weights<T>& weights, const Settings& settings) {
  std::optional<Entries> entries;
  auto top_p = settings.top_p, min_p = settings.min_p;
  if (settings.top_k > 0 && settings.top_k < static_cast<int64_t>(weights.size())) {
    entries = first_entries(weights, settings.top_k);
  } else if (top_p < 1) {
    entries = share_entries(weights, std::exchange(top_p, 1));
  } else if (min_p > 0) {
    entries = entries_from(weights, std::exchange(min_p, 0));
  }
  if (!entries) return entries_by_definition(weights, settings);
  cut_ordered(*entries, top_p, min_p, settings.typical);
  return std::move(*entries);
}

// Of all tokens. Sums before every 64th token are kept, and the place is looked for between two of them. Nothing where it is too close to
// a boundary.
template <class T>
std::optional<int64_t> draw_of_all(const Weights<T>& weights, double uniform) {
  constexpr size_t kRun = 64;
  std::vector<double> sums;
  sums.reserve(weights.size() / kRun + 1);
  double sum = 0;
  for (size_t token = 0; token < weights.size(); ++token) {
    if (token % kRun == 0) sums.push_back(sum);
    sum += weights.quick_weight(token);
  }
  const auto limit = uniform * sum, margin = weights.margin() * sum;
  const auto run = static_cast<size_t>(std::ranges::upper_bound(sums, limit) - sums.begin()) - 1;
  auto so_far = sums[run];
  for (auto token = run * kRun; token < weights.size(); ++token) {
    const auto next = so_far + weights.quick_weight(token);
    if (next > limit) {
      if (so_far >= limit - margin || next <= limit + margin) return {};
      return static_cast<int64_t>(token);
    }
    so_far = next;
  }
  return {};
}

template <class T>
Entries make_entries(std::span<const T> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt) {
  return with_weights(scores, settings, tokens, prompt, [&](const auto& weights) {
    return settings.temperature == 0 ? greedy_entry(weights) : normalized(entries_of(weights, settings));
  });
}

}  // namespace detail

inline Distribution::Distribution(std::span<const float> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt)
    : entries_(detail::make_entries(scores, settings, tokens, prompt)) {}

inline Distribution::Distribution(std::span<const double> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt)
    : entries_(detail::make_entries(scores, settings, tokens, prompt)) {}

template <class T>
Distribution Distribution::by_definition(std::span<const T> scores, const Settings& settings, std::span<const int64_t> tokens,
                                         int64_t prompt) {
  detail::largest_of(scores, tokens.size());
  const auto changed = detail::changed_scores(scores, settings, tokens, prompt);
  const auto best = static_cast<size_t>(std::ranges::max_element(changed) - changed.begin());
  const detail::Weights<double> weights(changed, best, settings, tokens.size());
  if (settings.temperature == 0) return Distribution(detail::greedy_entry(weights));
  return Distribution(detail::normalized(detail::entries_by_definition(weights, settings)));
}

inline int64_t Distribution::draw(double uniform) const {
  const auto limit = uniform * detail::sum_of(entries_);
  double sum = 0;
  int64_t last = entries_.back().token;
  for (const auto& entry : entries_) {
    if (entry.probability == 0) continue;
    sum += entry.probability;
    last = entry.token;
    if (sum > limit) break;
  }
  return last;
}

template <class T>
int64_t draw_token(std::span<const T> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt, double uniform) {
  return detail::with_weights(scores, settings, tokens, prompt, [&](const auto& weights) {
    if (settings.temperature == 0) return static_cast<int64_t>(weights.best);
    const bool cuts = settings.top_k > 0 || settings.top_p < 1 || settings.min_p > 0 || settings.typical < 1;
    const auto token = cuts ? std::nullopt : detail::draw_of_all(weights, uniform);
    return token ? *token : Distribution(detail::normalized(detail::entries_of(weights, settings))).draw(uniform);
  });
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
