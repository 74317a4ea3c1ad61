// Guesses of the next tokens, which a decoder verifies in one pass (Leviathan et al., "Fast Inference from Transformers via Speculative
// Decoding", 2023). The decoder draws each token as it would without guesses, from the same random number, and then looks whether a guess
// had it. So guesses change how many passes are needed, and no token.
#pragma once

#include <dtensor/generate/blocks.hpp>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// A guess: after the guess `parent` of the list, or after the last token (-1). A parent comes before its children.
struct Draft {
  int64_t token = 0;
  int64_t parent = -1;
};

// Gives guesses. Every rank asks alike and must get the same.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // At most `most` guesses (at most 64), a chain or a tree, after `tokens`, of which the first `prompt` are the prompt. None: an empty list.
  virtual std::vector<Draft> propose(std::span<const int64_t> tokens, int64_t prompt, int64_t most) = 0;
  // An output has grown to these tokens, and has ended or not.
  virtual void observe(std::span<const int64_t> tokens, int64_t prompt, bool ended) { static_cast<void>(tokens), static_cast<void>(prompt), static_cast<void>(ended); }
  // The weights have changed.
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
