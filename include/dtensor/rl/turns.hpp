// Rollouts of several turns: the model writes, a tool answers, the model goes on. Tokens go in and out as they are; no text is cut into
// tokens again.
//
//   const rl::Tool calculator = [](const rl::Turn& turn) -> std::optional<rl::Said> {
//     if (!is_question(turn.output.text)) return {};                                        // the conversation has ended
//     return rl::Said{tokens_of(result), result};
//   };
//   auto batch = rl::rollout_turns(engine, prompts, calculator, {.samples = 8}, {.turns = 4});
#pragma once

#include <dtensor/rl/rollout.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What the model has written in a turn, and what comes before it.
struct Turn {
  const generate::Output& output;
  const std::string& before;    // texts of the model's and the tool's turns so far
  const nlohmann::json& truth;  // of the prompt
  int64_t number = 0;           // from 0
};

// What a tool says to it.
struct Said {
  generate::Tokens tokens{};
  std::string text{};
};

// Nothing ends the conversation, and so does an error, which is counted. Every rank calls it alike, and gets the same.
using Tool = std::function<std::optional<Said>(const Turn& turn)>;

struct TurnOptions {
  int64_t turns = 4;          // of the model, at most
  int64_t tool_tokens = 256;  // that a tool may say in a turn; what is more is cut off
};

// As rollout(), with the same columns: `mask` has only tokens that the model drew, "texts" have what both said, and max_tokens bounds both
// together. Each turn of each answer has a seed of its own. A conversation ends when the tool says nothing, with the last turn, and with
// max_tokens (then it is not complete). Also gives the meta value "failed_tools". Throws as rollout() does, and without a tool.
Batch rollout_turns(generate::Engine& engine, const std::vector<Prompt>& prompts, const Tool& tool, const RolloutOptions& options,
                    const TurnOptions& turns = {}, at::ScalarType as = at::kFloat);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// A conversation: who goes on with it, and what there is.
struct Conversation {
  enum class State { model, tool, ended } state = State::model;
  int64_t prompt = 0, sample = 0;
  generate::Output said{};  // by both
  std::vector<bool> own{};

  void append(const generate::Tokens& tokens, const std::vector<double>& logprobs, const std::string& text, bool is_own) {
    said.tokens.insert(said.tokens.end(), tokens.begin(), tokens.end());
    said.logprobs.insert(said.logprobs.end(), logprobs.begin(), logprobs.end());
    said.text += text;
    own.resize(said.tokens.size(), is_own);
  }
};

// The model's turn of all that wait for it.
inline void take_turn(generate::Engine& engine, const std::vector<Prompt>& prompts, std::vector<Conversation*>& waiting,
                      const RolloutOptions& options, int64_t turn, std::vector<generate::Output>& outputs) {
  std::vector<generate::Request> requests;
  for (const auto* c : waiting) {
    auto tokens = prompts[c->prompt].tokens;
    tokens.insert(tokens.end(), c->said.tokens.begin(), c->said.tokens.end());
    auto settings = options.settings;
    settings.max_tokens -= static_cast<int64_t>(c->said.tokens.size());
    settings.min_tokens = std::min(settings.min_tokens, settings.max_tokens);
    settings.seed =
        mixed(request_seed(options.seed, options.step, c->prompt) + static_cast<uint64_t>(c->sample)) + static_cast<uint64_t>(turn);
    settings.n = 1;
    requests.push_back({std::move(tokens), settings});
  }
  for (auto& completion : engine.generate(requests)) outputs.push_back(std::move(completion.outputs[0]));
}

// The tool's. Returns false where it failed.
inline bool ask_tool(const Tool& tool, Conversation& c, const generate::Output& output, const std::string& before, const Prompt& prompt,
                     int64_t turn, int64_t room, const TurnOptions& options) {
  c.state = Conversation::State::ended;
  std::optional<Said> said;
  try {
    said = tool({output, before, prompt.truth, turn});
  } catch (const std::exception&) {
    return false;
  }
  if (!said) return true;
  if (static_cast<int64_t>(said->tokens.size()) > options.tool_tokens) said->tokens.resize(options.tool_tokens);
  if (static_cast<int64_t>(said->tokens.size()) >= room) {  // nothing is left for the model
    c.said.finish = generate::Finish::length;
    return true;
  }
  c.append(said->tokens, std::vector<double>(said->tokens.size()), said->text, false);
  c.state = Conversation::State::model;
  return true;
}

}  // namespace detail

inline Batch rollout_turns(generate::Engine& engine, const std::vector<Prompt>& prompts, const Tool& tool, const RolloutOptions& options,
                           const TurnOptions& turns, at::ScalarType as) {
  using State = detail::Conversation::State;
  const NoSpmd plain;
  const auto count = static_cast<int64_t>(prompts.size());
  require(tool != nullptr, detail::kRollout, "got no tool; hint: rollout() is for answers of one turn");
  require(count > 0 && options.samples > 0 && turns.turns > 0 && turns.tool_tokens >= 0, detail::kRollout,
          "got {} prompts, {} answers, {} turns and {} tokens of tools; expected 1 or more, and 0 or more of the last", count,
          options.samples, turns.turns, turns.tool_tokens);
  std::vector<detail::Conversation> all;
  for (int64_t i = 0; i < count * options.samples; ++i) all.push_back({.prompt = i / options.samples, .sample = i % options.samples});
  int64_t failed = 0;
  for (int64_t turn = 0; turn < turns.turns; ++turn) {
    std::vector<detail::Conversation*> waiting;
    for (auto& c : all) {
      if (c.state == State::model) waiting.push_back(&c);
    }
    if (waiting.empty()) break;
    std::vector<generate::Output> outputs;
    detail::take_turn(engine, prompts, waiting, options, turn, outputs);
    for (size_t i = 0; i < waiting.size(); ++i) {
      auto& c = *waiting[i];
      const auto before = c.said.text;
      c.append(outputs[i].tokens, outputs[i].logprobs, outputs[i].text, true);
      c.said.finish = outputs[i].finish;
      c.state = outputs[i].finish == generate::Finish::length || turn + 1 == turns.turns ? State::ended : State::tool;
      const auto room = options.settings.max_tokens - static_cast<int64_t>(c.said.tokens.size());
      if (c.state == State::tool) failed += !detail::ask_tool(tool, c, outputs[i], before, prompts[c.prompt], turn, room, turns);
    }
  }
  size_t time = 2;
  for (const auto& c : all) time = std::max(time, prompts[c.prompt].tokens.size() + c.said.tokens.size());
  detail::RolloutRows rows(static_cast<int64_t>(all.size()), static_cast<int64_t>(time), options.padding);
  for (const auto& c : all)
    rows.add(c.prompt, c.sample, request_seed(options.seed, options.step, c.prompt), prompts[c.prompt], c.said, c.own);
  auto batch = rows.batch(as);
  batch.meta()["failed_tools"] = failed;
  return batch;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
