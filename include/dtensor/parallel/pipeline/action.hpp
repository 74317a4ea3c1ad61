// One thing that a rank does in a pipeline: [stage][kind][microbatch], such as 2F0. The text is PyTorch's.
#pragma once

#include <dtensor/parallel/pipeline/words.hpp>

#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

enum class Kind : int8_t {
  F,            // forward
  I,            // the first half of a backward: gradients of the stage's inputs
  W,            // the second half: gradients of its weights
  B,            // both at once
  OVERLAP_F_B,  // a pair: the forward of one stage and microbatch while the backward of another runs
  SEND_F,       // an output, to the stages that it feeds
  RECV_F,
  SEND_B,  // the gradient of an input, to the stage that it came from
  RECV_B,
  UNSHARD,      // fully sharded parameters of the stage are gathered,
  RESHARD,      // freed again,
  REDUCE_GRAD,  // and its gradients reduced after the last microbatch
};

struct Action {
  int stage = 0;
  Kind kind = Kind::F;
  int microbatch = -1;  // -1: the action is of none (UNSHARD, RESHARD, REDUCE_GRAD)
  // Of a pair: the backward's stage and microbatch. Of a message: the stage at the other end, if that is not the next one.
  int other_stage = -1;
  int other_microbatch = -1;

  bool operator==(const Action&) const = default;
};

// F(stage, microbatch) with B(backward_stage, backward_microbatch): "(0F7;7B3)".
Action overlapped(int stage, int microbatch, int backward_stage, int backward_microbatch);

// "2F0", "1UNSHARD", "(0F7;7B3)"; a message to or from a stage that is not the next one also names that: "0SEND_F3@2".
std::string text(const Action& action);

// The same as PyTorch writes it in files: "(0F7;7B3)OVERLAP_F_B".
std::string csv_text(const Action& action);

// Reads either form. Throws for other texts.
Action parse_action(std::string_view text);

bool is_compute(Kind kind);  // F, I, W, B and pairs
bool is_message(Kind kind);  // SEND_F, RECV_F, SEND_B, RECV_B
bool is_send(Kind kind);

// The stage at the other end of a message, and the action there that belongs to it.
int other_end(const Action& message);
Action counterpart(const Action& message);

// The compute actions that an action is made of: a pair's two, or itself alone.
class Parts {
 public:
  explicit Parts(const Action& action);
  const Action* begin() const { return parts_.data(); }
  const Action* end() const { return parts_.data() + count_; }

 private:
  std::array<Action, 2> parts_;
  int count_ = 1;
};

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr std::array<std::string_view, 12> kKindNames{"F",      "I",      "W",      "B",       "OVERLAP_F_B", "SEND_F",
                                                             "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD",     "REDUCE_GRAD"};

// Stages and microbatches from here on are refused, as what nobody means.
inline constexpr int kTooMany = 1 << 20;

inline std::string_view blanks_removed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
  return first == text.npos ? std::string_view{} : text.substr(first, last - first + 1);
}

// The number that `text` begins with, which is taken off it.
inline std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number >= kTooMany || text.front() == '-') return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

// Where the other end of a message is unless it says something else: outputs go forward, gradients back.
inline int next_stage(const Action& message) {
  return message.kind == Kind::SEND_F || message.kind == Kind::RECV_B ? message.stage + 1 : message.stage - 1;
}

inline bool of_microbatch(Kind kind) { return is_compute(kind) || is_message(kind); }

inline std::optional<Action> read_simple(std::string_view text) {
  Action action;
  const auto stage = take_number(text);
  const auto letters = text.substr(0, text.find_first_of("0123456789"));
  size_t kind = 0;
  while (kind < kKindNames.size() && kKindNames[kind] != letters) ++kind;
  if (!stage || kind == kKindNames.size()) return std::nullopt;
  action.stage = *stage;
  action.kind = static_cast<Kind>(kind);
  text.remove_prefix(letters.size());
  if (action.kind == Kind::OVERLAP_F_B || of_microbatch(action.kind) == text.empty()) return std::nullopt;
  if (text.empty()) return action;
  const auto microbatch = take_number(text);
  if (!microbatch) return std::nullopt;
  action.microbatch = *microbatch;
  if (is_message(action.kind) && text.starts_with('@')) {
    text.remove_prefix(1);
    const auto other = take_number(text);
    if (!other) return std::nullopt;
    if (*other != next_stage(action)) action.other_stage = *other;
  }
  return text.empty() ? std::optional(action) : std::nullopt;
}

inline std::optional<Action> read_pair(std::string_view text) {
  const auto middle = text.find(';'), end = text.find(')');
  if (middle == text.npos || end == text.npos || middle > end) return std::nullopt;
  const auto rest = blanks_removed(text.substr(end + 1));
  const auto forward = read_simple(blanks_removed(text.substr(1, middle - 1)));
  const auto backward = read_simple(blanks_removed(text.substr(middle + 1, end - middle - 1)));
  if (!forward || !backward || forward->kind != Kind::F || backward->kind != Kind::B) return std::nullopt;
  if (!rest.empty() && rest != kKindNames[static_cast<size_t>(Kind::OVERLAP_F_B)]) return std::nullopt;
  return overlapped(forward->stage, forward->microbatch, backward->stage, backward->microbatch);
}

}  // namespace detail

inline Action overlapped(int stage, int microbatch, int backward_stage, int backward_microbatch) {
  return {stage, Kind::OVERLAP_F_B, microbatch, backward_stage, backward_microbatch};
}

inline std::string text(const Action& action) {
  if (action.kind == Kind::OVERLAP_F_B) {
    return detail::joined({"(", action.stage, "F", action.microbatch, ";", action.other_stage, "B", action.other_microbatch, ")"});
  }
  auto result = std::to_string(action.stage).append(detail::kKindNames[static_cast<size_t>(action.kind)]);
  if (action.microbatch >= 0) result += std::to_string(action.microbatch);
  if (action.other_stage >= 0) result += "@" + std::to_string(action.other_stage);
  return result;
}

inline std::string csv_text(const Action& action) { return action.kind == Kind::OVERLAP_F_B ? text(action) + "OVERLAP_F_B" : text(action); }

inline Action parse_action(std::string_view text) {
  const auto word = detail::blanks_removed(text);
  const auto action = word.starts_with('(') ? detail::read_pair(word) : detail::read_simple(word);
  if (!action) {
    detail::refuse({"'", word.substr(0, 64),
                    "' is no action; expected [stage][F|I|W|B|SEND_F|RECV_F|SEND_B|RECV_B][microbatch], "
                    "[stage][UNSHARD|RESHARD|REDUCE_GRAD] or a pair ([stage]F[microbatch];[stage]B[microbatch]); hint: stage 2's forward "
                    "of microbatch "
                    "0 is 2F0"});
  }
  return *action;
}

inline bool is_compute(Kind kind) { return kind <= Kind::OVERLAP_F_B; }
inline bool is_message(Kind kind) { return kind >= Kind::SEND_F && kind <= Kind::RECV_B; }
inline bool is_send(Kind kind) { return kind == Kind::SEND_F || kind == Kind::SEND_B; }

inline int other_end(const Action& message) { return message.other_stage >= 0 ? message.other_stage : detail::next_stage(message); }

inline Action counterpart(const Action& message) {
  const auto kind = static_cast<int8_t>(message.kind);
  Action other{other_end(message), static_cast<Kind>(is_send(message.kind) ? kind + 1 : kind - 1), message.microbatch};
  if (detail::next_stage(other) != message.stage) other.other_stage = message.stage;
  return other;
}

inline Parts::Parts(const Action& action) : parts_{action, {}} {
  if (action.kind != Kind::OVERLAP_F_B) return;
  parts_ = {Action{action.stage, Kind::F, action.microbatch}, Action{action.other_stage, Kind::B, action.other_microbatch}};
  count_ = 2;
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
