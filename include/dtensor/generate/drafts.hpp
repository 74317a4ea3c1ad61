// Guesses of the next tokens, which a decoder verifies in one pass (Leviathan et al., "Fast Inference from Transformers via Speculative
// Decoding", 2023). The decoder draws each token as it would without guesses, from the same random number, and then looks whether a guess
// had it. So guesses change how many passes are needed, and no token. Guesses that are in drafters.hpp: of n-grams, of earlier outputs, of
// a smaller model.
#pragma once

#include <dtensor/generate/sampling.hpp>

#include <span>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// A guess: after the guess `parent` of the list, or after the last token (-1). A parent comes before its children.
struct Draft {
  int64_t token = 0;
  int64_t parent = -1;
};

// An output that guesses are wanted for.
struct DraftContext {
  std::span<const int64_t> tokens;  // so far
  int64_t prompt = 0;               // of these, so many are the prompt
  const Settings& settings;
  int64_t index = 0;  // of the request's outputs; with it uniform_of() gives the numbers that the decoder will draw by
  int64_t most = 0;   // guesses, 1 to 64
};

// Gives guesses. On a mesh every rank asks alike and must get the same.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // A chain or a tree for each output; none: an empty list.
  virtual std::vector<std::vector<Draft>> propose(const std::vector<DraftContext>& outputs) = 0;
  // An output has grown to these tokens; those from `from` on are new.
  virtual void observe(std::span<const int64_t> /*tokens*/, int64_t /*prompt*/, int64_t /*from*/) {}
  // The weights of the model have changed.
  virtual void weights_changed() {}
};

// Whether each guess comes after the one before it.
inline bool is_chain(const std::vector<Draft>& drafts) {
  for (size_t i = 0; i < drafts.size(); ++i) {
    if (drafts[i].parent != static_cast<int64_t>(i) - 1) return false;
  }
  return true;
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
