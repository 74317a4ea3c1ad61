// Dropout of attention weights whose numbers go by where a weight is in the whole, and not by which rank computes it when. So every method
// on any number of ranks drops the same ones, and a backward pass finds them again without having kept any.
#pragma once

#include <dtensor/rng/philox.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// A weight is dropped with this probability, and those that stay are divided by 1 - probability. Which are dropped depends on the seed, and
// on row of the batch, head, position of the query and position of the key.
struct AttentionDropout {
  double probability = 0;
  uint64_t seed = 0;                      // the same on every rank
  std::vector<int64_t> batch{}, heads{};  // which of the whole this rank's rows of the batch and its heads are; empty: 0, 1, ...

  double scale() const { return probability < 1 ? 1 / (1 - probability) : 0; }  // of the weights that stay
};

// A seed from the stream of one device: one draw of the generator of each rank of `mesh`, which all draw it. Throws where these differ, as
// random operators do. Communicates nothing but to compare generators.
uint64_t draw_dropout_seed(const DeviceMesh& mesh);

// -- How ------------------------------------------------------------------------------------------------------------------

inline uint64_t draw_dropout_seed(const DeviceMesh& mesh) {
  constexpr int64_t kSeeds = int64_t{1} << 62;
  const auto drawn = randint(0, kSeeds, {1}, mesh, Placements(mesh.ndim(), replicate()), c10::kLong);
  if (drawn.is_absent()) return 0;
  const auto seed = drawn.to_local();
  return seed.is_meta() ? 0 : static_cast<uint64_t>(seed.item<int64_t>());  // a dry run has no values
}

namespace context::detail {

// Writes [queries, keys], row-major: true where the weight is dropped. Each has 32 bits of Philox: key positions 4 i to 4 i + 3 share a
// block, whose counter is (i, query, head, row of the batch).
inline void write_dropped(const AttentionDropout& dropout, int64_t row, int64_t head, std::span<const int64_t> queries,
                          std::span<const int64_t> keys, bool* dropped) {
  const auto limit = static_cast<uint64_t>(std::llround(std::ldexp(dropout.probability, 32)));
  const auto number = [](const std::vector<int64_t>& numbers, int64_t i) {
    return static_cast<uint64_t>(numbers.empty() ? i : numbers[i]);
  };
  const uint64_t high = number(dropout.batch, row) << 32 | number(dropout.heads, head);
  for (const auto query : queries) {
    rng::PhiloxBlock block{};
    int64_t at = -1;  // of which four keys
    for (const auto key : keys) {
      if (key / 4 != at) {
        at = key / 4;
        block = rng::philox4x32_10(dropout.seed, static_cast<uint64_t>(query) << 32 | static_cast<uint64_t>(at), high);
      }
      *dropped++ = block.word[key % 4] < limit;
    }
  }
}

}  // namespace context::detail

}  // namespace dtensor

#pragma GCC visibility pop
