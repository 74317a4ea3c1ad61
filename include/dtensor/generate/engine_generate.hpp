// How an engine generates for a list of prompts, on one device or in groups of ranks, and takes weights, see engine.hpp.
#pragma once

#include <dtensor/generate/engine.hpp>

#pragma GCC visibility push(default)

namespace dtensor::generate {

inline std::vector<Completion> Engine::generate(const std::vector<Tokens>& prompts, const Settings& settings) {
  std::vector<Request> requests;
  for (const auto& prompt : prompts) requests.push_back({prompt, settings});
  return generate(requests);
}

inline std::vector<Completion> Engine::generate(const std::vector<Request>& requests) {
  refuse_in_step("generate()");
  return others_ && idle() ? generate_in_groups(requests) : generate_here(requests);
}

inline std::vector<Completion> Engine::generate_here(const std::vector<Request>& requests) {
  std::vector<Future> futures;
  std::vector<Completion> completions;
  try {
    for (const auto& request : requests) futures.push_back(submit(request));
    for (auto& future : futures) completions.push_back(future.get());
  } catch (...) {
    for (auto& future : futures) future.cancel();
    throw;
  }
  return completions;
}

// All groups have the same cache and the same count of arrivals afterwards, so that what is submitted next goes alike on all ranks.
inline std::vector<Completion> Engine::generate_in_groups(const std::vector<Request>& requests) {
  detail::Asked asked;
  for (const auto& request : requests) check_request(request), asked.add(request.prompt, request.settings, request.priority);
  const auto count = static_cast<int64_t>(requests.size()), groups = others_->size(), group = others_->coordinate(0);
  std::vector<detail::Answer> answers;
  std::vector<Future> futures;
  std::exception_ptr error;
  const auto arrived = arrivals_;
  try {
    const detail::Apart apart(apart_);
    for (auto i = count * group / groups; i < count * (group + 1) / groups; ++i) futures.push_back(submit(requests[i]));
    for (auto& future : futures) {
      answers.emplace_back();
      answers.back().completion = future.get();
    }
  } catch (...) {
    error = std::current_exception();
    for (auto& future : futures) future.cancel();
    if (answers.empty()) answers.emplace_back();
    answers.back().failed = group + 1;
    answers.back().error = dtensor::detail::text_of(error);
  }
  answers = detail::exchange_answers(std::move(answers), asked, *others_);
  blocks_->forget();
  arrivals_ = arrived + count;
  asked_ = {};
  if (const auto* failure = detail::first_failure(answers)) {
    if (failure->failed == group + 1) std::rethrow_exception(error);
    fail("generate", "a prompt failed on other ranks: {}", failure->error);
  }
  std::vector<Completion> completions;
  for (auto& answer : answers) completions.push_back(std::move(answer.completion));
  tell_drafter(requests, completions);
  return completions;
}

// Drafters learn from all groups' outputs.
inline void Engine::tell_drafter(const std::vector<Request>& requests, const std::vector<Completion>& completions) {
  if (!options_.drafter) return;
  const auto count = static_cast<int64_t>(requests.size()), groups = others_->size(), group = others_->coordinate(0);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_own = i >= count * group / groups && i < count * (group + 1) / groups;
    for (const auto& output : completions[i].outputs) {
      auto tokens = requests[i].prompt;
      const auto prompt = static_cast<int64_t>(tokens.size());
      tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
      options_.drafter->observe(tokens, prompt, is_own ? static_cast<int64_t>(tokens.size()) : prompt);
    }
  }
}

inline void Engine::load_weights(const NamedWeights& from, int64_t version, bool recompute) {
  require(module_, "generate", "the engine has a function and no module; hint: write the weights and call load_weights(version)");
  copy_weights(*module_, from);
  load_weights(version, recompute);
}

inline void Engine::load_weights(const torch::nn::Module& from, int64_t version, bool recompute) {
  load_weights(named_weights(from), version, recompute);
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
