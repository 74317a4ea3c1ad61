// How ranks that have to call an engine alike notice that they did not, see engine.hpp.
#pragma once

#include <dtensor/base/error_text.hpp>
#include <dtensor/collectives.hpp>
#include <dtensor/dispatch/failure.hpp>
#include <dtensor/generate/request.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cstring>

#pragma GCC visibility push(default)

namespace dtensor::generate::detail {

// Calls each(name, hash) for each part of a request that decides tokens. Of callbacks it says whether there is one.
template <class Each>
void each_field(const Tokens& prompt, const Settings& s, int64_t priority, const Each& each) {
  const auto field = [&](const char* name, const auto&... values) { each(name, c10::get_hash(values...)); };
  size_t biases = 0, words = 0, stops = 0;
  for (const auto& [token, bias] : s.logit_bias) biases = c10::get_hash(biases, token, bias);
  for (const auto& word : s.bad_words) words = c10::get_hash(words, word.size(), word);
  for (const auto& text : s.stop) stops = c10::get_hash(stops, text);
  field("prompt", prompt.size(), prompt);
  field("priority", priority);
  field("temperature", s.temperature);
  field("top_k", s.top_k);
  field("top_p", s.top_p);
  field("min_p", s.min_p);
  field("typical", s.typical);
  field("repetition_penalty", s.repetition_penalty);
  field("presence_penalty", s.presence_penalty);
  field("frequency_penalty", s.frequency_penalty);
  field("logit_bias", s.logit_bias.size(), biases);
  field("bad_words", s.bad_words.size(), words);
  field("allowed", static_cast<bool>(s.allowed));
  field("max_tokens", s.max_tokens);
  field("min_tokens", s.min_tokens);
  field("stop_tokens", s.stop_tokens.size(), s.stop_tokens);
  field("stop", s.stop.size(), stops);
  field("seed", s.seed);
  field("n", s.n);
  field("top_logprobs", s.top_logprobs);
  field("logprobs_of_sampled", s.logprobs_of_sampled);
  field("prompt_logprobs", s.prompt_logprobs);
}

// What an engine was asked for, in a few numbers: how many requests, and of each field a hash over all of them.
class Asked {
 public:
  Asked() : numbers_(1, 0) {
    each_field({}, {}, 0, [&](const char* name, size_t) { add(name, 0); });
  }

  void add(const Tokens& prompt, const Settings& settings, int64_t priority) {
    ++numbers_[0];
    size_t i = 0;
    each_field(prompt, settings, priority, [&](const char*, size_t hash) {
      ++i;
      numbers_[i] = static_cast<int64_t>(c10::get_hash(static_cast<size_t>(numbers_[i]), hash));
    });
  }
  // One more field, that all ranks add.
  void add(const char* name, size_t hash) {
    names_.push_back(name);
    numbers_.push_back(static_cast<int64_t>(hash));
  }
  bool empty() const { return numbers_[0] == 0; }
  const Tokens& numbers() const { return numbers_; }

  // Throws where a rank's numbers are not those of the first. `all`: those of each rank of `ranks`, `stride` apart.
  void check(const int64_t* all, int64_t stride, const DeviceMesh& ranks) const {
    for (int64_t rank = 1; rank < ranks.size(); ++rank) {
      const auto* own = all + rank * stride;
      require(own[0] == all[0], "generate", "rank {} of {} asked for {} prompts, rank 0 for {}; expected the same ones on every rank", rank,
              ranks.str(), own[0], all[0]);
      for (size_t i = 0; i < names_.size(); ++i) {
        require(own[i + 1] == all[i + 1], "generate",
                "rank {} of {} asked for other prompts or settings than rank 0: another {}; expected all of them alike on every rank", rank,
                ranks.str(), names_[i]);
      }
    }
  }

 private:
  std::vector<const char*> names_;
  Tokens numbers_;
};

inline at::Tensor numbers_of(const Tokens& numbers) {
  const NoSpmd plain;
  return at::tensor(numbers, at::kLong);
}

// The same on all ranks, or every rank throws. One all_gather.
inline void check_asked(const Asked& asked, const DeviceMesh& ranks) {
  const NoSpmd plain;
  const auto all = all_gather(numbers_of(asked.numbers()), ranks);
  asked.check(all.data_ptr<int64_t>(), static_cast<int64_t>(asked.numbers().size()), ranks);
}

// What a rank says of one part of a pass.
struct Told {
  bool failed = false;
  int64_t last = 0;   // its tokens and whether it has ended, as a number
  std::string error;  // where it failed
};

// Of each part the first rank on which it failed, and that rank's error; -1: none. Throws on every rank where a part that failed nowhere
// differs. One all_gather, and where something failed another one.
inline std::vector<std::pair<int64_t, std::string>> agree_on(const std::vector<Told>& own, const DeviceMesh& ranks) {
  constexpr int64_t kMostText = 500;
  const NoSpmd plain;
  const auto parts = static_cast<int64_t>(own.size());
  Tokens numbers;
  for (const auto& told : own) numbers.insert(numbers.end(), {told.failed ? 1 : 0, told.last});
  const auto all = all_gather(numbers_of(numbers), ranks);
  const auto at = [&](int64_t rank, int64_t part) { return all.data_ptr<int64_t>() + 2 * (rank * parts + part); };
  std::vector<std::pair<int64_t, std::string>> failures(own.size(), {-1, ""});
  bool any = false;
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t rank = ranks.size(); rank-- > 0;) {
      if (at(rank, part)[0] != 0) failures[part].first = rank, any = true;
    }
    for (int64_t rank = 1; rank < ranks.size() && failures[part].first < 0; ++rank) {
      require(at(rank, part)[1] == at(0, part)[1], "generate",
              "ranks drew other tokens, or ended other requests: rank {} of {} and rank 0; hint: a callback for allowed tokens must do the "
              "same on every rank, and so must one that cancels or aborts",
              rank, ranks.str());
    }
  }
  if (!any) return failures;
  const auto texts = at::zeros({parts, kMostText}, at::kByte);
  for (int64_t part = 0; part < parts; ++part) {
    const auto& text = own[part].error;
    std::memcpy(texts.data_ptr<uint8_t>() + part * kMostText, text.data(), std::min<size_t>(text.size(), kMostText));
  }
  const auto of_all = all_gather(texts, ranks);
  for (int64_t part = 0; part < parts; ++part) {
    if (failures[part].first < 0) continue;
    const auto* begin = reinterpret_cast<const char*>(of_all.data_ptr<uint8_t>()) + (failures[part].first * parts + part) * kMostText;
    failures[part].second.assign(begin, strnlen(begin, kMostText));
  }
  return failures;
}

// In a catch block, on one or all of `ranks`, which make the same steps of a model on `mesh`: `step` failed here. Others may wait for this
// rank in a pass, on whichever dimensions of the mesh, or be through with it: now they hear of it, and throw. Where it failed on all ranks,
// they go on. `left_out`: a dimension of the mesh over which these steps do not communicate, or -1.
inline void tell_failure(const DeviceMesh& ranks, const DeviceMesh& mesh, int64_t left_out, int64_t step) noexcept try {
  dispatch::note_failure(ranks, "generate", fmt::format("step {}", step));
  const auto told = numbers_of({step});
  std::vector<comm::Async> calls;
  const auto call = [&](comm::Communicator& group) {
    try {
      if (group.size() > 1) calls.push_back(group.all_gather(told, Lengths(group.size(), 1)));
    } catch (...) {  // as what follows, since others have failed
    }
  };
  if (left_out >= 0) call(dtensor::detail::group_of(ranks));
  for (int64_t choice = 1; choice < int64_t{1} << mesh.ndim(); ++choice) {
    Lengths dims;
    for (int64_t d = 0; d < mesh.ndim(); ++d) {
      if (choice >> d & 1) dims.push_back(d);
    }
    if (std::ranges::find(dims, left_out) == dims.end()) call(mesh.communicator(dims));
  }
  for (auto& each : calls) {
    if (each.work) each.work->done();  // a call that nobody waits for goes on in the background: all of them at once
  }
  for (auto& each : calls) {
    try {
      std::move(each).get();
    } catch (...) {
    }
  }
} catch (...) {
}

}  // namespace dtensor::generate::detail

#pragma GCC visibility pop
