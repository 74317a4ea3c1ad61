// What an engine is asked for, and what it answers.
#pragma once

#include <dtensor/generate/sampling.hpp>

#include <memory>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor::generate {

enum class Finish {
  unfinished,
  stop_token,  // the last token is one of stop_tokens
  stop_text,   // the text went on with one of stop
  length,      // max_tokens, or the longest sequence of the engine
  aborted,     // by Engine::abort(): what there is so far
  cancelled,   // by Future::cancel()
};

std::string str(Finish finish);

// A piece of output `index` of a request, as it comes.
struct Piece {
  int64_t index = 0;
  int64_t token = -1;  // none where only the end is told
  std::string text;    // new text, without what may turn out to be the begin of a stop text
  double logprob = 0;
  Finish finish = Finish::unfinished;  // else this is the last piece
};

struct Request {
  Tokens prompt{};
  Settings settings{};
  int64_t priority = 0;  // lower ones first; equal ones in the order in which they came
  // Called at each token, on every rank. What it throws ends this request.
  std::function<void(const Piece&)> on_piece{};
};

struct TokenLogprob {
  int64_t token = 0;
  double logprob = 0;
};

struct Output {
  Tokens tokens;
  std::string text;  // of the tokens, up to a stop text
  Finish finish = Finish::unfinished;
  std::vector<double> logprobs;                // of the tokens, in nats
  std::vector<std::vector<TokenLogprob>> top;  // of each token's place, the most probable first; where top_logprobs asks for them
  std::vector<int64_t> versions;               // of the weights that each token is from
};

struct Completion {
  std::vector<Output> outputs;          // n of them
  std::vector<double> prompt_logprobs;  // of its second token and those after it; where asked for
  int64_t cached = 0;                   // tokens of the prompt that were found in the cache
};

namespace detail {

// Text that grows token by token, until one of some texts is in it.
class GrowingText {
 public:
  // Adds text. Returns true when a stop text is in it; the text then ends before that.
  bool add(const std::string& more, const std::vector<std::string>& stops) {
    auto begin = text_.size();
    text_ += more;
    for (const auto& stop : stops) {
      const auto from = begin >= stop.size() ? begin - stop.size() + 1 : 0;
      end_ = std::min(end_, text_.find(stop, from));
    }
    if (end_ != std::string::npos) text_.resize(end_);
    return end_ != std::string::npos;
  }

  const std::string& text() const { return text_; }

  // What was not shown yet and cannot be the begin of a stop text; at the end, all of it.
  std::string show(const std::vector<std::string>& stops, bool is_end) {
    size_t kept = 0;
    for (const auto& stop : stops) {
      for (auto length = std::min(stop.size() - 1, text_.size() - shown_); length > kept && !is_end; --length) {
        if (text_.ends_with(std::string_view(stop).substr(0, length))) kept = length;
      }
    }
    const auto end = text_.size() - kept;
    const auto fresh = text_.substr(shown_, end - shown_);
    shown_ = end;
    return fresh;
  }

 private:
  std::string text_;
  size_t shown_ = 0, end_ = std::string::npos;
};

}  // namespace detail

inline std::string str(Finish finish) {
  switch (finish) {
    case Finish::unfinished: return "unfinished";
    case Finish::stop_token: return "stop token";
    case Finish::stop_text: return "stop text";
    case Finish::length: return "length";
    case Finish::aborted: return "aborted";
    case Finish::cancelled: return "cancelled";
  }
  return "?";
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
