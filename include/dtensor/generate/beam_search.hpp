// The most probable continuations of a prompt, by beam search.
//
//   for (const auto& beam : dtensor::generate::beam_search(engine, prompt, {.width = 4, .max_tokens = 40})) use(beam.tokens, beam.score);
#pragma once

#include <dtensor/generate/engine.hpp>

#pragma GCC visibility push(default)

namespace dtensor::generate {

struct BeamOptions {
  int64_t width = 4;          // beams at a time
  int64_t max_tokens = 128;   // new ones
  Tokens stop_tokens{};       // end a beam, and are its last token
  double length_penalty = 1;  // a beam's score is its log-probability divided by its number of new tokens to this power
  int64_t n = 1;              // results, up to width
};

struct Beam {
  Tokens tokens;       // new ones
  double logprob = 0;  // in nats, of all of them
  double score = 0;
  Finish finish = Finish::unfinished;
};

// The n best that were found, the best first. At each step the continuations of all beams compete; of equal ones those of the better beam,
// then of the smaller token. It ends when no beam can get better than the worst of `width` that have ended. The beams share pages of the
// engine's cache; requests under way give theirs back first where there is too little room. On a mesh every rank calls it. Throws for bad
// options, a prompt that Engine::submit refuses, and a cache that is too small.
std::vector<Beam> beam_search(Engine& engine, const Tokens& prompt, const BeamOptions& options = {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

class BeamSearch {
 public:
  BeamSearch(Engine& engine, const Tokens& prompt, const BeamOptions& options) : engine_(engine), options_(options), prompt_(prompt) {
    engine_.refuse_in_step("beam_search()");
    Settings settings;
    settings.max_tokens = options.max_tokens;
    settings.stop_tokens = options.stop_tokens;
    engine_.check_request({prompt, settings});
    require(options.width >= 1 && options.width <= kMostBeams, "beam_search", "got a width of {} beams; expected 1 to {}", options.width,
            kMostBeams);
    require(options.n >= 1 && options.n <= options.width, "beam_search", "got {} results of {} beams; expected 1 to {}", options.n,
            options.width, options.width);
    require(std::isfinite(options.length_penalty), "beam_search", "got a length penalty of {}; expected a finite number",
            options.length_penalty);
    asked_.add(prompt, settings, 0);
    asked_.add("width", c10::get_hash(options.width));
    asked_.add("number of results", c10::get_hash(options.n));
    asked_.add("length penalty", c10::get_hash(options.length_penalty));
  }

  std::vector<Beam> run() {
    const NoSpmd plain;
    ++engine_.steps_;
    try {
      if (const auto* ranks = engine_.together()) check_asked(asked_, *ranks);
      return search();
    } catch (...) {
      engine_.tell_failure();
      throw;
    }
  }

 private:
  static constexpr int64_t kMostBeams = int64_t{1} << 20;

  std::vector<Beam> search() {
    begin();
    const auto room = engine_.longest() - static_cast<int64_t>(prompt_.size());
    const auto most = std::min(options_.max_tokens, room);
    for (int64_t count = 1; count <= most && !beams_.empty(); ++count) {
      extend(pass());
      if (is_over(count)) break;
    }
    for (const auto& beam : beams_) end(beam, Finish::length);
    std::ranges::stable_sort(ended_, [](const Beam& a, const Beam& b) { return a.score > b.score; });
    ended_.resize(std::min<size_t>(ended_.size(), options_.n));
    return std::move(ended_);
  }

  struct Growing {
    PageTable table;
    Tokens tokens;
    int64_t computed = 0;
    double logprob = 0;
  };
  struct Candidate {
    double logprob;
    size_t beam;
    int64_t token;
  };

  void begin() {
    beams_.push_back({PageTable(*engine_.blocks_), prompt_});
    auto& first = beams_[0];
    first.computed = first.table.match(prompt_, static_cast<int64_t>(prompt_.size()) - 1);
    const auto last = static_cast<int64_t>(prompt_.size()) - 1, step = engine_.options_.tokens_per_step;
    while (first.computed < last) {
      StepRows rows;
      std::vector<std::span<const int64_t>> before;
      PageTable::Copies copies;
      const auto end = std::min(last, first.computed + step);
      add_rows(first, end, rows, before, copies);
      rows.scored = {0};
      engine_.runner_.run(rows, before);
    }
  }

  // Rows of a beam, up to `end`.
  void add_rows(Growing& beam, int64_t end, StepRows& rows, std::vector<std::span<const int64_t>>& before, PageTable::Copies& copies) {
    if (!beam.table.reserve(beam.computed, end, copies)) {
      engine_.scheduler_->restart();
      const bool fits = beam.table.reserve(beam.computed, end, copies);
      require(fits, "beam_search", "{} beams of {} tokens have no room in a cache of {} bytes; hint: a larger cache_bytes, or fewer beams",
              options_.width, end, engine_.options_.cache_bytes);
    }
    before.emplace_back(std::span<const int64_t>(beam.tokens).first(beam.computed));
    RowSpan span{rows.rows(), 0, beam.computed, beam.table.blocks().data(), nullptr};
    for (; beam.computed < end; ++beam.computed) {
      rows.ids.push_back(beam.tokens[beam.computed]);
      rows.positions.push_back(beam.computed);
    }
    span.end = rows.rows();
    rows.spans.push_back(span);
  }

  // Log-probabilities [beams, vocabulary] of what comes next.
  at::Tensor pass() {
    StepRows rows;
    std::vector<std::span<const int64_t>> before;
    PageTable::Copies copies;
    for (auto& beam : beams_) {
      add_rows(beam, static_cast<int64_t>(beam.tokens.size()), rows, before, copies);
      rows.scored.push_back(rows.rows() - 1);
      beam.table.filled(beam.tokens, beam.computed - 1);
    }
    engine_.runner_.copy(copies);
    const auto logprobs = at::log_softmax(engine_.runner_.run(rows, before), -1);
    require(!logprobs.isnan().any().item<bool>(), "beam_search", "the scores after {} tokens have NaN", beams_[0].computed);
    return logprobs;
  }

  // The best continuations of all beams, twice as many as beams, since some may end.
  std::vector<Candidate> candidates(const at::Tensor& logprobs) const {
    std::vector<Candidate> all;
    for (size_t i = 0; i < beams_.size(); ++i) {
      for (int64_t token = 0; token < logprobs.size(1); ++token) {
        all.push_back({beams_[i].logprob + value_at(logprobs, static_cast<int64_t>(i), token), i, token});
      }
    }
    const auto most = std::min<size_t>(all.size(), options_.width * (options_.stop_tokens.size() + 1));
    const auto before = [](const Candidate& a, const Candidate& b) {
      return a.logprob != b.logprob ? a.logprob > b.logprob : std::pair(a.beam, a.token) < std::pair(b.beam, b.token);
    };
    std::ranges::partial_sort(all, all.begin() + static_cast<int64_t>(most), before);
    all.resize(most);
    return all;
  }

  void extend(const at::Tensor& logprobs) {
    std::vector<Growing> next;
    const auto all = candidates(logprobs);
    for (size_t rank = 0; rank < all.size() && static_cast<int64_t>(next.size()) < options_.width; ++rank) {
      const auto& [logprob, from, token] = all[rank];
      const bool stops = std::ranges::find(options_.stop_tokens, token) != options_.stop_tokens.end();
      if (stops && static_cast<int64_t>(rank) >= options_.width) continue;
      Growing beam{beams_[from].table.fork(beams_[from].computed), beams_[from].tokens, beams_[from].computed, logprob};
      beam.tokens.push_back(token);
      stops ? end(beam, Finish::stop_token) : next.push_back(std::move(beam));
    }
    beams_ = std::move(next);
  }

  double score_of(double logprob, int64_t count) const { return logprob / std::pow(static_cast<double>(count), options_.length_penalty); }

  void end(const Growing& beam, Finish why) {
    Beam result{Tokens(beam.tokens.begin() + static_cast<int64_t>(prompt_.size()), beam.tokens.end()), beam.logprob, 0, why};
    result.score = score_of(beam.logprob, static_cast<int64_t>(result.tokens.size()));
    ended_.push_back(std::move(result));
  }

  // Keeps the best that have ended. Whether the best beam, as long as it is now, is no better than the worst of these.
  bool is_over(int64_t count) {
    std::ranges::stable_sort(ended_, [](const Beam& a, const Beam& b) { return a.score > b.score; });
    if (static_cast<int64_t>(ended_.size()) > options_.width) ended_.resize(options_.width);
    if (static_cast<int64_t>(ended_.size()) < options_.width || beams_.empty()) return false;
    if (score_of(beams_[0].logprob, count) > ended_.back().score) return false;
    beams_.clear();
    return true;
  }

  Engine& engine_;
  const BeamOptions& options_;
  const Tokens& prompt_;
  Asked asked_;
  std::vector<Growing> beams_;
  std::vector<Beam> ended_;
};

}  // namespace detail

inline std::vector<Beam> beam_search(Engine& engine, const Tokens& prompt, const BeamOptions& options) {
  return detail::BeamSearch(engine, prompt, options).run();
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
