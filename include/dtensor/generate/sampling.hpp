// Which token comes next: settings, the distribution that they make of a model's scores, and a draw from it.
//
// Scores are changed in this order: what is not allowed goes (allowed, bad_words, end tokens before min_tokens), logit_bias is added,
// penalties are taken off, all is divided by the temperature, and of the softmax the most probable tokens stay: top_k, top_p, min_p,
// typical, each of what the one before left. Sums are float64. Distribution::by_definition() does just that. The ways that are used
// look at fewer tokens, and give the same to the bit (sampling_ways.hpp).
#pragma once

#include <dtensor/generate/blocks.hpp>
#include <dtensor/rng/random.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
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

// What a token is drawn from: tokens that are left, and their probabilities. In the order of tokens, or where one of the cuts orders them,
// the most probable first (typical: the closest to the mean information).
class Distribution {
 public:
  struct Entry {
    int64_t token;
    double probability;
    bool operator==(const Entry&) const = default;
  };

  // `scores` [vocabulary] of the model after `tokens`, of which the first `prompt` are the prompt. Throws when scores are NaN, and when no
  // token is allowed.
  Distribution(std::span<const float> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt);
  Distribution(std::span<const double> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt);
  // Of probabilities that add up to anything but 0.
  explicit Distribution(std::vector<Entry> entries) : entries_(std::move(entries)) {}
  // The same, step by step as the text on top says: copies all scores, and orders all tokens where one of the cuts wants them ordered.
  template <class T>
  static Distribution by_definition(std::span<const T> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt);

  const std::vector<Entry>& entries() const { return entries_; }
  // The token where the sum of probabilities exceeds `uniform`, a number in [0, 1).
  int64_t draw(double uniform) const;
  double probability(int64_t token) const;
  double log_probability(int64_t token) const { return std::log(probability(token)); }

 private:
  std::vector<Entry> entries_;
};

// The token that Distribution(scores, settings, tokens, prompt).draw(uniform) gives. Without cuts it keeps no list of tokens.
template <class T>
int64_t draw_token(std::span<const T> scores, const Settings& settings, std::span<const int64_t> tokens, int64_t prompt, double uniform);

// The number in [0, 1) of a sample: of output `index` of a request, for its token at `position`. `lane` 0 draws a token; a method that
// needs more numbers for one token takes further lanes.
inline double uniform_of(uint64_t seed, int64_t index, int64_t position, int64_t lane = 0) {
  return rng::uniform_at(seed, static_cast<uint64_t>(index) << 40 | static_cast<uint64_t>(position), lane);
}

// -- How ------------------------------------------------------------------------------------------------------------------

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

#include <dtensor/generate/sampling_ways.hpp>

#pragma GCC visibility pop
