// How an engine works: see engine.hpp.
#pragma once

#include <dtensor/generate/engine.hpp>
#include <dtensor/generate/engine_pass.hpp>

#pragma GCC visibility push(default)

namespace dtensor::generate {

inline Engine::Engine(Forward forward, torch::nn::Module* module, const EngineOptions& options)
    : options_(options),
      module_(module),
      runner_(detail::in_evaluation(std::move(forward), module, options.batch_invariant), detail::mesh_of(module)),
      others_(detail::others_over(module, runner_.mesh(), options.split_over)),
      group_(others_ ? runner_.mesh()->slice(options.split_over, others_->coordinate(0)) : runner_.mesh()) {
  require(options.max_requests >= 1 && options.tokens_per_step >= 1 && options.chunk >= 0 && options.max_length >= 0, "generate",
          "got max_requests {}, tokens_per_step {}, chunk {} and max_length {}; expected at least 1, 1, 0 and 0", options.max_requests,
          options.tokens_per_step, options.chunk, options.max_length);
  require(options.drafts >= 0 && options.drafts <= 64, "generate", "got {} drafts at a time; expected 0 to 64", options.drafts);
  require(options.drafts_per_step >= 0, "generate", "got {} drafts for a step; expected 0 or more", options.drafts_per_step);
  const auto bytes = runner_.bytes_of_block();
  // Where nothing is kept, blocks are numbers only.
  const auto count = runner_.pages() ? std::min(int64_t{1} << 24, options.cache_bytes / bytes) : int64_t{1} << 16;
  require(count >= 1, "generate",
          "a cache of {} bytes has no room for a block of {} positions, which takes {} bytes on this rank; hint: cache_bytes",
          options.cache_bytes, kBlockRows, bytes);
  runner_.allocate(count);
  blocks_ = std::make_unique<Blocks>(count, options.share_prefixes && runner_.pages());
  scheduler_ = std::make_unique<Scheduler>(*blocks_, SchedulerOptions{options.max_requests, options.tokens_per_step, options.chunk});
}

inline Engine::~Engine() { end_all(Finish::aborted); }

inline int64_t Engine::longest() const {
  auto most = std::numeric_limits<int64_t>::max();
  if (options_.max_length > 0) most = std::min(most, options_.max_length);
  if (runner_.positions() > 0) most = std::min(most, runner_.positions());
  return most;
}

inline void Engine::check_request(const Request& request) const {
  check(request.settings, runner_.vocabulary());
  const auto length = static_cast<int64_t>(request.prompt.size());
  require(length > 0, "generate", "got an empty prompt; expected at least one token; hint: begin with the model's begin-of-text token");
  for (const auto token : request.prompt) {
    require(token >= 0 && token < runner_.vocabulary(), "generate", "the prompt has token {}; expected 0 to {}", token,
            runner_.vocabulary() - 1);
  }
  require(length < longest(), "generate", "got a prompt of {} tokens; the longest sequence, with output, has {}", length, longest());
  const auto rows = length + std::min(request.settings.max_tokens, longest() - length) - 1;
  const auto needed = rows / kBlockRows + (rows % kBlockRows > 0);
  require(needed <= blocks_->count(), "generate",
          "a prompt of {} tokens and {} new ones need {:.0f} bytes of cache on this rank, which has {}; hint: a larger cache_bytes, or "
          "fewer max_tokens",
          length, request.settings.max_tokens, static_cast<double>(needed) * static_cast<double>(runner_.bytes_of_block()),
          options_.cache_bytes);
}

inline Future Engine::submit(Request request) {
  check_request(request);
  const auto group = std::make_shared<detail::Group>();
  group->request = std::move(request);
  group->arrival = arrivals_++;
  asked_.add(group->request.prompt, group->request.settings, group->request.priority);
  group->outputs.push_back(std::make_unique<detail::Growing>(*blocks_, *group, 0));
  scheduler_->add(*group->outputs[0]);
  groups_.push_back(group);
  return {*this, group};
}

inline bool Future::ready() const { return group_->ended; }

inline Completion Future::get() {
  while (!group_->ended) engine_->step();
  if (group_->error) std::rethrow_exception(group_->error);
  return group_->completion;
}

inline void Future::cancel() {
  if (group_->ended) return;
  engine_->end(*group_, Finish::cancelled);
  engine_->forget_ended();
}

// What a step has begun with is there until it ends: callbacks may end it in between.
inline void Engine::forget_ended() {
  if (in_step_) return;
  std::erase_if(groups_, [](const auto& group) { return group->ended; });
}

inline void Engine::refuse_in_step(const char* what) const {
  require(!in_step_, "generate",
          "{} was called from a callback, inside of a step; hint: a callback may submit, cancel and abort; do the rest after the step",
          what);
}

// The ranks that make the same steps, if there are several.
inline const DeviceMesh* Engine::together() const {
  const auto& ranks = apart_ ? group_ : runner_.mesh();
  return ranks && ranks->size() > 1 ? &*ranks : nullptr;
}

inline void Engine::step() {
  refuse_in_step("step() or get()");
  if (idle()) return;
  const NoSpmd plain;
  ++steps_;
  try {
    const detail::InStep in_step(in_step_);
    const auto asked = std::exchange(asked_, {});
    if (const auto* ranks = together(); ranks && !asked.empty()) detail::check_asked(asked, *ranks);
    if (options_.drafter) propose();
    const auto plan = scheduler_->plan();
    require(!plan.parts.empty(), "generate", "nothing can be computed with {} of {} blocks unused", blocks_->unused(), blocks_->count());
    run(plan);
  } catch (...) {
    end_all(Finish::aborted, std::current_exception());
    tell_failure();
    throw;
  }
  forget_ended();
}

inline void Engine::tell_failure() const noexcept {
  const auto* ranks = together();
  if (ranks) detail::tell_failure(*ranks, *runner_.mesh(), apart_ ? runner_.mesh()->dim(options_.split_over) : -1, steps_);
}

// Guesses for the outputs that have all but their last token computed.
inline void Engine::propose() {
  std::vector<DraftContext> contexts;
  std::vector<detail::Growing*> of;
  const auto under_way = std::clamp<int64_t>(scheduler_->running() + scheduler_->waiting(), 1, options_.max_requests);
  const auto each = std::max<int64_t>(1, options_.drafts_per_step / under_way);
  for (const auto& group : groups_) {
    const auto& settings = group->request.settings;
    for (const auto& output : group->outputs) {
      output->guesses.clear();
      output->drafts = 0;
      const auto count = static_cast<int64_t>(output->tokens.size());
      if (output->ended || count != output->computed + 1) continue;
      const auto left = std::min(settings.max_tokens - static_cast<int64_t>(output->output.tokens.size()), longest() - count) - 1;
      const auto most = std::min({left, options_.drafts, each});
      if (most < 1) continue;
      contexts.push_back({output->tokens, output->prompt, settings, output->index, most});
      of.push_back(output.get());
    }
  }
  if (of.empty()) return;
  auto guesses = options_.drafter->propose(contexts);
  require(guesses.size() == of.size(), "generate", "the drafter gave guesses for {} outputs; expected {}", guesses.size(), of.size());
  for (size_t i = 0; i < of.size(); ++i) {
    if (static_cast<int64_t>(guesses[i].size()) > contexts[i].most) guesses[i].resize(contexts[i].most);
    if (!runner_.pages() && !is_chain(guesses[i])) continue;
    of[i]->guesses = std::move(guesses[i]);
    of[i]->drafts = static_cast<int64_t>(of[i]->guesses.size());
    for (const auto& guess : of[i]->guesses) {
      const bool fits =
          guess.token >= 0 && guess.token < runner_.vocabulary() && guess.parent >= -1 && guess.parent < &guess - of[i]->guesses.data();
      require(fits, "generate", "the drafter guessed token {} after guess {}", guess.token, guess.parent);
    }
  }
}

inline void Engine::observe(detail::Growing& output) {
  if (!options_.drafter) return;
  options_.drafter->observe(output.tokens, output.prompt, output.observed);
  output.observed = static_cast<int64_t>(output.tokens.size());
}

inline void Engine::run(const Scheduler::Plan& plan) {
  detail::Pass pass(plan);
  counts_.most_blocks = std::max(counts_.most_blocks, blocks_->count() - blocks_->unused());
  runner_.copy(plan.copies);
  if (pass.rows.scored.empty()) pass.rows.scored.push_back(0);
  pass.errors.resize(plan.parts.size());
  pass.scores = runner_.run(pass.rows, pass.before, [&](size_t span) {  // without pages a part is a span
    pass.errors[span] = std::current_exception();
    tell_failure();
  });
  pass.logprobs = at::log_softmax(pass.scores, -1);
  ++counts_.passes;
  counts_.rows += pass.rows.rows();
  for (size_t part = 0; part < plan.parts.size(); ++part) advance(pass, part);
  if (together()) agree(pass);
}

// The tokens that a part gives: one, and one more for each guess that was right.
inline void Engine::advance(detail::Pass& pass, size_t index) {
  const auto& part = pass.plan.parts[index];
  const auto& place = pass.places[index];
  auto& output = static_cast<detail::Growing&>(*part.sequence);
  if (output.ended) return;
  if (pass.errors[index]) return end(output.group, Finish::aborted, pass.errors[index]);
  const auto count = static_cast<int64_t>(output.tokens.size());
  auto& of_prompt = output.group.completion.prompt_logprobs;
  for (int64_t i = 0; i < place.of_prompt; ++i) {
    if (part.begin + i != static_cast<int64_t>(of_prompt.size())) continue;  // computed before its pages were taken
    of_prompt.push_back(detail::value_at(pass.logprobs, place.scored + i, output.tokens[part.begin + i + 1]));
  }
  output.computed = std::min(part.end, count);
  output.table.filled(output.tokens, output.computed);
  if (output.computed < count) return;
  ++counts_.sequence_passes;
  const auto first_row = place.scored + place.of_prompt;
  try {
    if (output.index == 0 && output.output.tokens.empty()) fork(pass, output, first_row);
    if (output.ended) return;
    std::vector<int64_t> path;
    for (int64_t node = -1;;) {
      const auto token = draw(pass, output, first_row + 1 + node);
      if (output.ended) return;
      int64_t next = node + 1;
      while (next < place.drafts && (output.guesses[next].parent != node || output.guesses[next].token != token)) ++next;
      if (next >= place.drafts) break;
      path.push_back(node = next);
    }
    for (size_t i = 0; i < path.size(); ++i) {
      const auto to = count + static_cast<int64_t>(i), from = count + path[i];
      if (from != to) runner_.copy_place(output.table.blocks().data(), from, to);
    }
    output.computed += static_cast<int64_t>(path.size());
    output.table.filled(output.tokens, output.computed);
    observe(output);
  } catch (...) {
    end(output.group, Finish::aborted, std::current_exception());
  }
}

// The other outputs of a request begin with the pages of the first, when its prompt is computed.
inline void Engine::fork(detail::Pass& pass, detail::Growing& first, int64_t row) {
  auto& group = first.group;
  for (int64_t i = 1; i < group.request.settings.n && !group.ended; ++i) {
    auto& other = *group.outputs.emplace_back(std::make_unique<detail::Growing>(*blocks_, group, i));
    other.table = first.table.fork(first.computed);
    other.computed = first.computed;
    other.cached = 0;
    draw(pass, other, row);
    if (!other.ended) scheduler_->add(other);
  }
}

inline int64_t Engine::draw(detail::Pass& pass, detail::Growing& output, int64_t row) {
  const auto& settings = output.group.request.settings;
  const auto uniform = uniform_of(settings.seed, output.index, static_cast<int64_t>(output.tokens.size()));
  std::optional<Distribution> from;
  if (settings.logprobs_of_sampled) from = detail::distribution_of(pass.scores, row, output.tokens, output.prompt, settings);
  const auto token = from ? from->draw(uniform) : detail::token_of(pass.scores, row, output.tokens, output.prompt, settings, uniform);
  if (!output.ended) append(pass, output, row, token, from);
  return token;
}

inline void Engine::append(detail::Pass& pass, detail::Growing& to, int64_t row, int64_t token, const std::optional<Distribution>& from) {
  const auto& request = to.group.request;
  const auto& settings = request.settings;
  auto& output = to.output;
  ++counts_.tokens;
  to.tokens.push_back(token);
  output.tokens.push_back(token);
  output.versions.push_back(version_);
  output.logprobs.push_back(from ? from->log_probability(token) : detail::value_at(pass.logprobs, row, token));
  if (settings.top_logprobs > 0) {
    std::vector<TokenLogprob> all;
    if (from) {
      for (const auto& entry : from->entries()) all.push_back({entry.token, std::log(entry.probability)});
    } else {
      for (int64_t i = 0; i < pass.logprobs.size(1); ++i) all.push_back({i, detail::value_at(pass.logprobs, row, i)});
    }
    output.top.push_back(detail::most_probable(std::move(all), settings.top_logprobs));
  }
  auto end = Finish::unfinished;
  if (std::ranges::find(settings.stop_tokens, token) != settings.stop_tokens.end()) {
    end = Finish::stop_token;
  } else {
    const auto text = options_.text_of ? options_.text_of(token) : std::string(1, static_cast<char>(token));
    if (to.text.add(text, settings.stop)) end = Finish::stop_text;
  }
  const auto count = static_cast<int64_t>(output.tokens.size());
  if (end == Finish::unfinished && (count >= settings.max_tokens || static_cast<int64_t>(to.tokens.size()) >= longest()))
    end = Finish::length;
  if (request.on_piece) {
    request.on_piece({to.index, token, to.text.show(settings.stop, end != Finish::unfinished), output.logprobs.back(), end});
  }
  if (end != Finish::unfinished && !to.ended) finish(to, end);
}

inline void Engine::finish(detail::Growing& output, Finish why) {
  output.ended = true;
  output.output.finish = why;
  output.output.text = output.text.text();
  scheduler_->remove(output);
  observe(output);
  auto& group = output.group;
  const auto n = static_cast<size_t>(group.request.settings.n);
  if (group.outputs.size() == n && std::ranges::all_of(group.outputs, &detail::Growing::ended)) end(group, why);
}

// Completes what is complete, and else what there is, or its error.
inline void Engine::end(detail::Group& group, Finish why, std::exception_ptr error) {
  if (group.ended) return;
  group.ended = true;
  group.error = error;
  group.completion.outputs.resize(group.request.settings.n);
  group.completion.cached = std::max<int64_t>(0, group.outputs[0]->cached);
  for (auto& output : group.completion.outputs) output.finish = why;
  for (const auto& output : group.outputs) {
    scheduler_->remove(*output);
    if (!output->ended) output->output.finish = why, output->output.text = output->text.text();
    output->ended = true;
    group.completion.outputs[output->index] = std::move(output->output);
  }
}

inline void Engine::end_all(Finish why, std::exception_ptr error) {
  for (size_t i = 0; i < groups_.size(); ++i) end(*groups_[i], why, error);
  forget_ended();
}

inline void Engine::abort() { end_all(Finish::aborted); }

// Callbacks are a rank's own. What failed on one rank fails on all, and tokens that differ end all requests.
inline void Engine::agree(const detail::Pass& pass) {
  std::vector<detail::Told> told;
  for (const auto& part : pass.plan.parts) {
    const auto& output = static_cast<const detail::Growing&>(*part.sequence);
    auto& of_part = told.emplace_back();
    of_part.failed = output.group.error != nullptr;
    if (of_part.failed) of_part.error = dtensor::detail::text_of(output.group.error);
    of_part.last = static_cast<int64_t>(c10::get_hash(output.tokens.size(), output.tokens.back(), output.ended));
  }
  const auto failures = detail::agree_on(told, *together());
  for (size_t i = 0; i < failures.size(); ++i) {
    const auto& [rank, why] = failures[i];
    auto& group = static_cast<detail::Growing&>(*pass.plan.parts[i].sequence).group;
    if (rank < 0 || group.error) continue;
    try {
      fail("generate", "this request failed on rank {} of {}: {}", rank, together()->str(), why);
    } catch (...) {
      group.ended = false;  // it may have ended here
      end(group, Finish::aborted, std::current_exception());
    }
  }
}

inline void Engine::load_weights(int64_t version, bool recompute) {
  refuse_in_step("load_weights()");
  runner_.weights_changed();
  version_ = version;
  blocks_->forget();
  recompute ? scheduler_->restart() : scheduler_->keep();
  if (options_.drafter) options_.drafter->weights_changed();
}

inline EngineCounts Engine::counts() const {
  auto counts = counts_;
  counts.preemptions = scheduler_->preemptions();
  counts.blocks_found = blocks_->found();
  return counts;
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
