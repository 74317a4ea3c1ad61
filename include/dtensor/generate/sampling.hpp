// Which token comes next: settings, the distribution that they make of a model's scores, and a draw from it.
//
// Scores are changed in this order: what is not allowed goes (allowed, bad_words, end tokens before min_tokens), logit_bias is added,
// penalties are taken off, all is divided by the temperature, and of the softmax the most probable tokens stay: top_k, top_p, min_p,
// typical, each of what the one before left. Sums are float64.
#pragma once

#include <dtensor/generate/blocks.hpp>
#include <dtensor/rng/random.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::generate {

struct Settings {
  double temperature = 1;  // 0: the most probable token; of equal ones that of the smaller number
  int64_t top_k = 0;       // only so many of the most probable tokens; 0: all
  double top_p = 1;        // only the fewest, most probable first, that have this probability together
  double min_p = 0;        // only those with at least this share of the largest probability
  double typical = 1;      // only the fewest, closest to the mean information first, that have this probability together
  // A score above 0 is divided by it, one below multiplied, where the token is in prompt or output (Keskar et al., "CTRL", 2019).
  double repetition_penalty = 1;
  double presence_penalty = 0;             // taken off the score of each token in the output
  double frequency_penalty = 0;            // taken off for each time that it is there
  std::map<int64_t, double> logit_bias{};  // added to the scores of tokens
  std::vector<Tokens> bad_words{};         // sequences of tokens that the output is not to have
  // Which tokens may come next: it clears those that may not. `tokens` are prompt and output so far. Called on every rank.
  std::function<void(std::span<const int64_t> tokens, std::vector<bool>& allowed)> allowed{};

  int64_t max_tokens = 128;         // of the output
  int64_t min_tokens = 0;           // no stop token before
  Tokens stop_tokens{};             // end the output, and are its last token
  std::vector<std::string> stop{};  // texts that end the output; the text of the result is cut before them

  uint64_t seed = 0;
  int64_t n = 1;  // outputs of a prompt; output i draws from a stream of its own
  // Beside each token's log-probability those of so many of the most probable ones.
  int64_t top_logprobs = 0;
  // false: log-probabilities of the model's own scores, which training computes too. true: of what the token was drawn from.
  bool logprobs_of_sampled = false;
  bool prompt_logprobs = false;  // those of the prompt's tokens as well
};

// Throws for settings that make no sense, and for tokens outside of the vocabulary.
void check(const Settings& settings, int64_t vocabulary);

// What a token is drawn from: tokens that are left, and their probabilities.
class Distribution {
 public:
  struct Entry {
    int64_t token;
    double probability;
  };

  // `scores` [vocabulary] of the model after `tokens`, of which the first `prompt` are the prompt. Throws when scores are NaN, and when no
  // token is allowed.
  Distribution(std::span<const float> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt);
  Distribution(std::span<const double> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt);
  // Of probabilities that add up to anything but 0.
  explicit Distribution(std::vector<Entry> entries) : entries_(std::move(entries)) {}

  const std::vector<Entry>& entries() const { return entries_; }
  // The token where the sum of probabilities exceeds `uniform`, a number in [0, 1).
  int64_t draw(double uniform) const;
  double probability(int64_t token) const;
  double log_probability(int64_t token) const { return std::log(probability(token)); }

 private:
  template <class T>
  void make(std::span<const T> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt);

  std::vector<Entry> entries_;
};

// The number in [0, 1) of a sample: of output `index` of a request, for its token at `position`. `lane` 0 draws a token; a method that
// needs more numbers for one token takes further lanes.
inline double uniform_of(uint64_t seed, int64_t index, int64_t position, int64_t lane = 0) {
  return rng::uniform_at(seed, static_cast<uint64_t>(index) << 40 | static_cast<uint64_t>(position), lane);
}

// -- How ------------------------------------------------------------------------------------------------------------------

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

inline bool before(const Distribution::Entry& a, const Distribution::Entry& b) {
  return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
}

inline double sum_of(const std::vector<Distribution::Entry>& entries) {
  double sum = 0;
  for (const auto& entry : entries) sum += entry.probability;
  return sum;
}

// The first of a sorted list that have `share` of the sum together.
inline void keep_share(std::vector<Distribution::Entry>& entries, double share) {
  const auto limit = share * sum_of(entries);
  double sum = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    sum += entries[i].probability;
    if (sum >= limit) return entries.resize(i + 1);
  }
}

inline void keep_typical(std::vector<Distribution::Entry>& entries, double share) {
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

inline void cut(std::vector<Distribution::Entry>& entries, const Settings& settings) {
  const auto most = static_cast<int64_t>(entries.size());
  if (settings.top_k > 0 && settings.top_k < most) {
    std::ranges::nth_element(entries, entries.begin() + settings.top_k, before);
    entries.resize(settings.top_k);
  }
  if (settings.top_p < 1 || settings.min_p > 0) std::ranges::sort(entries, before);
  if (settings.top_p < 1) keep_share(entries, settings.top_p);
  if (settings.min_p > 0) {
    const auto least = entries[0].probability * settings.min_p;
    std::erase_if(entries, [&](const auto& entry) { return entry.probability < least; });
  }
  if (settings.typical < 1) keep_typical(entries, settings.typical);
}

}  // namespace detail

inline Distribution::Distribution(std::span<const float> scores, const Settings& settings, std::span<const int64_t> tokens,
                                  int64_t prompt) {
  make(scores, settings, tokens, prompt);
}

inline Distribution::Distribution(std::span<const double> scores, const Settings& settings, std::span<const int64_t> tokens,
                                  int64_t prompt) {
  make(scores, settings, tokens, prompt);
}

template <class T>
void Distribution::make(std::span<const T> from, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt) {
  std::vector<double> scores(from.begin(), from.end());
  for (const auto score : scores) {
    if (std::isnan(score) || score == -detail::kForbidden) {
      fail("generate", "the model's scores after {} tokens have {}", tokens.size(), std::isnan(score) ? "NaN" : "infinity");
    }
  }
  detail::forbid_bad_words(scores, settings, tokens, prompt);
  if (static_cast<int64_t>(tokens.size()) - prompt < settings.min_tokens) {
    for (const auto token : settings.stop_tokens) scores[token] = detail::kForbidden;
  }
  if (settings.allowed) {
    std::vector<bool> allowed(scores.size(), true);
    settings.allowed(tokens, allowed);
    require(allowed.size() == scores.size(), "generate", "the callback for allowed tokens made a list of {}; expected {}", allowed.size(),
            scores.size());
    for (size_t token = 0; token < scores.size(); ++token) {
      if (!allowed[token]) scores[token] = detail::kForbidden;
    }
  }
  for (const auto& [token, bias] : settings.logit_bias) scores[token] += bias;
  detail::penalize(scores, settings, tokens, prompt);
  const auto largest = std::ranges::max_element(scores);
  if (*largest == detail::kForbidden)
    fail("generate", "no token is allowed after {} tokens; hint: see allowed, bad_words, logit_bias", tokens.size());
  if (settings.temperature == 0) {
    entries_.push_back({largest - scores.begin(), 1});
    return;
  }
  entries_.reserve(scores.size());
  for (size_t token = 0; token < scores.size(); ++token) {
    if (scores[token] == detail::kForbidden) continue;
    entries_.push_back({static_cast<int64_t>(token), std::exp((scores[token] - *largest) / settings.temperature)});
  }
  detail::cut(entries_, settings);
  const auto sum = detail::sum_of(entries_);
  for (auto& entry : entries_) entry.probability /= sum;
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

inline double Distribution::probability(int64_t token) const {
  for (const auto& entry : entries_) {
    if (entry.token == token) return entry.probability;
  }
  return 0;
}

inline void check(const Settings& s, int64_t vocabulary) {
  const auto that = [](bool ok, const char* name, const char* expected, auto value) {
    require(ok, "generate", "got {} of {}; expected {}", name, value, expected);
  };
  that(s.temperature >= 0 && std::isfinite(s.temperature), "a temperature", "0 (the most probable token) or more", s.temperature);
  that(s.top_k >= 0, "top_k", "0 (all tokens) or more", s.top_k);
  that(s.top_p > 0 && s.top_p <= 1, "top_p", "a number above 0, up to 1", s.top_p);
  that(s.min_p >= 0 && s.min_p <= 1, "min_p", "a number from 0 to 1", s.min_p);
  that(s.typical > 0 && s.typical <= 1, "typical", "a number above 0, up to 1", s.typical);
  that(s.repetition_penalty > 0 && std::isfinite(s.repetition_penalty), "a repetition penalty", "a number above 0", s.repetition_penalty);
  that(std::isfinite(s.presence_penalty), "a presence penalty", "a number", s.presence_penalty);
  that(std::isfinite(s.frequency_penalty), "a frequency penalty", "a number", s.frequency_penalty);
  that(s.max_tokens >= 1, "max_tokens", "1 or more", s.max_tokens);
  that(s.min_tokens >= 0 && s.min_tokens <= s.max_tokens, "min_tokens", "0 to max_tokens", s.min_tokens);
  that(s.n >= 1, "n", "1 or more outputs", s.n);
  that(s.top_logprobs >= 0 && s.top_logprobs <= vocabulary, "top_logprobs", "0 up to the vocabulary", s.top_logprobs);
  const auto in_vocabulary = [&](int64_t token, const char* where) {
    require(token >= 0 && token < vocabulary, "generate", "{} has token {}; expected 0 to {}", where, token, vocabulary - 1);
  };
  for (const auto& [token, bias] : s.logit_bias) {
    in_vocabulary(token, "logit_bias");
    that(!std::isnan(bias) && bias < std::numeric_limits<double>::infinity(), "a logit bias", "a number, or -infinity", bias);
  }
  for (const auto token : s.stop_tokens) in_vocabulary(token, "stop_tokens");
  for (const auto& word : s.bad_words) {
    require(!word.empty(), "generate", "one of the bad words is empty");
    for (const auto token : word) in_vocabulary(token, "bad_words");
  }
  for (const auto& text : s.stop) require(!text.empty(), "generate", "one of the stop texts is empty");
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
