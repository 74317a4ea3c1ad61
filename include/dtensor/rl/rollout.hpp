// Answers of a generation engine as a batch: tokens, masks, log-probabilities, seeds and texts.
//
//   auto batch = rl::rollout(engine, prompts, {.settings = {.max_tokens = 256}, .samples = 8, .seed = 7, .step = step});
//   auto ids = batch.get("ids");                                       // [batch, time]: prompt and answer, padded on the right
//   auto logp = rl::token_statistics(model->forward(ids.narrow(1, 0, time - 1)), ids.narrow(1, 1, time - 1)).logp;
#pragma once

#include <dtensor/generate/engine.hpp>
#include <dtensor/rl/balance.hpp>
#include <dtensor/rl/batch.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What is asked, and what its verifier has to know (the right answer, say).
struct Prompt {
  generate::Tokens tokens{};
  nlohmann::json truth{};
};

struct RolloutOptions {
  generate::Settings settings{};  // its seed and n are not read
  int64_t samples = 1;            // answers to each prompt: a group
  uint64_t seed = 0;
  int64_t step = 0;     // other steps draw other answers
  int64_t padding = 0;  // the token behind an answer's end
};

// The columns of rollout(), of prompts * samples rows; the answers to one prompt follow each other. "time" is that of the longest row, and
// columns of [batch, time - 1] are of the token after each place, as a model scores it.
//
//   ids           int64 [batch, time]        prompt, answer, padding
//   mask          bool [batch, time - 1]     which tokens are the answer's
//   rollout_logp  float [batch, time - 1]    their log-probabilities when they were drawn; 0 elsewhere. In float64 where `as` says so
//   groups        int64 [batch]              the number of the prompt in `prompts`
//   seeds         int64 [batch, 2]           of the prompt's request, and which of its outputs it is; no two rows have the same pair
//   complete      bool [batch]               ended by itself, and not by max_tokens
//   texts, truths                            of the answer; of its prompt
//
// Meta values, lists with a number for each row: "lengths", "prompt_lengths" and "prompt_numbers" (as in groups).
std::vector<std::string> rollout_columns();

// Every rank of the engine's mesh calls it alike, and has the whole batch then. Where groups of ranks decode apart, each gets as many
// prompts, and about as many of their tokens. Communicates what Engine::generate() does. Throws for no prompts and fewer than 1 sample.
Batch rollout(generate::Engine& engine, const std::vector<Prompt>& prompts, const RolloutOptions& options, at::ScalarType as = at::kFloat);

// The seed of a request: of the run's seed, the step, and the number of the prompt.
uint64_t request_seed(uint64_t seed, int64_t step, int64_t prompt);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kRollout = "rl::rollout";

// Splitmix64 (Steele et al., 2014): other inputs give other outputs.
inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The order in which prompts are given to `groups` that each decode a run of them.
inline Rows decoding_order(const std::vector<Prompt>& prompts, int64_t groups) {
  std::vector<int64_t> lengths;
  for (const auto& prompt : prompts) lengths.push_back(static_cast<int64_t>(prompt.tokens.size()));
  const auto count = static_cast<int64_t>(prompts.size());
  if (groups == 1 || count % groups != 0 || std::ranges::count(lengths, lengths[0]) == count) return numbers(0, count);
  Rows order;
  for (const auto& part : balance(lengths, groups, {.equal_counts = true})) order.insert(order.end(), part.begin(), part.end());
  return order;
}

// Rows as they are written.
struct RolloutRows {
  at::Tensor ids, mask, logp, groups, seeds, complete;
  std::vector<std::string> texts;
  Objects truths;
  std::vector<int64_t> lengths, prompt_lengths, prompt_numbers;

  RolloutRows(int64_t rows, int64_t time, int64_t padding)
      : ids(at::full({rows, time}, padding, at::kLong)),
        mask(at::zeros({rows, time - 1}, at::kBool)),
        logp(at::zeros({rows, time - 1}, at::kDouble)),
        groups(at::zeros({rows}, at::kLong)),
        seeds(at::zeros({rows, 2}, at::kLong)),
        complete(at::zeros({rows}, at::kBool)) {}

  void add(int64_t group, int64_t sample, uint64_t seed, const Prompt& prompt, const generate::Output& output) {
    add(group, sample, seed, prompt, output, std::vector<bool>(output.tokens.size(), true));
  }
  // `own` says which of the output's tokens the model has drawn.
  void add(int64_t group, int64_t sample, uint64_t seed, const Prompt& prompt, const generate::Output& output,
           const std::vector<bool>& own) {
    const auto row = static_cast<int64_t>(lengths.size()), begin = static_cast<int64_t>(prompt.tokens.size());
    auto* const tokens = ids.data_ptr<int64_t>() + row * ids.size(1);
    std::ranges::copy(prompt.tokens, tokens);
    std::ranges::copy(output.tokens, tokens + begin);
    std::ranges::copy(own, mask.data_ptr<bool>() + row * mask.size(1) + begin - 1);
    std::ranges::copy(output.logprobs, logp.data_ptr<double>() + row * logp.size(1) + begin - 1);
    groups.data_ptr<int64_t>()[row] = group;
    seeds.data_ptr<int64_t>()[2 * row] = static_cast<int64_t>(seed);
    seeds.data_ptr<int64_t>()[2 * row + 1] = sample;
    complete.data_ptr<bool>()[row] = output.finish != generate::Finish::length;
    texts.push_back(output.text);
    truths.push_back(prompt.truth);
    lengths.push_back(begin + static_cast<int64_t>(output.tokens.size()));
    prompt_lengths.push_back(begin);
    prompt_numbers.push_back(group);
  }

  Batch batch(at::ScalarType as) const {
    Batch made{{"ids", ids},     {"mask", mask},   {"rollout_logp", logp.to(as)}, {"groups", groups},
               {"seeds", seeds}, {"texts", texts}, {"complete", complete},        {"truths", truths}};
    made.meta() = {{"lengths", lengths}, {"prompt_lengths", prompt_lengths}, {"prompt_numbers", prompt_numbers}};
    return made;
  }
};

}  // namespace detail

inline std::vector<std::string> rollout_columns() {
  return {"ids", "mask", "rollout_logp", "groups", "seeds", "complete", "texts", "truths"};
}

inline uint64_t request_seed(uint64_t seed, int64_t step, int64_t prompt) {
  return detail::mixed(detail::mixed(detail::mixed(seed) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(prompt)) >> 1;
}

inline Batch rollout(generate::Engine& engine, const std::vector<Prompt>& prompts, const RolloutOptions& options, at::ScalarType as) {
  const NoSpmd plain;
  const auto count = static_cast<int64_t>(prompts.size());
  require(count > 0 && options.samples > 0, detail::kRollout, "got {} prompts and {} answers to each; expected 1 or more of both", count,
          options.samples);
  const auto& mesh = engine.runner().mesh();
  const auto& dims = mesh ? mesh->names() : std::vector<std::string>();
  const auto dp = std::ranges::find(dims, "dp");
  const auto order = detail::decoding_order(prompts, dp == dims.end() ? 1 : mesh->size(mesh->dim("dp")));
  std::vector<generate::Request> requests;
  for (const auto i : order) {
    auto settings = options.settings;
    settings.seed = request_seed(options.seed, options.step, i);
    settings.n = options.samples;
    requests.push_back({prompts[i].tokens, settings});
  }
  const auto answers = engine.generate(requests);
  std::vector<int64_t> place(count);
  int64_t time = 2;
  for (int64_t i = 0; i < count; ++i) {
    place[order[i]] = i;
    for (const auto& output : answers[i].outputs) {
      time = std::max(time, static_cast<int64_t>(requests[i].prompt.size() + output.tokens.size()));
    }
  }
  detail::RolloutRows rows(count * options.samples, time, options.padding);
  for (int64_t i = 0; i < count; ++i) {
    const auto& request = requests[place[i]];
    for (int64_t s = 0; s < options.samples; ++s) rows.add(i, s, request.settings.seed, prompts[i], answers[place[i]].outputs[s]);
  }
  return rows.batch(as);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
