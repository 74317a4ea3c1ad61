// Skips ahead in ATen's CPU stream, the Mersenne Twister MT19937, without drawing.
#pragma once

#include <ATen/core/MT19937RNGEngine.h>

namespace dtensor::rng {

// Leaves the engine as after `words` more 32-bit outputs. It goes block by block, or, far ahead, by a jump of a few milliseconds, however
// far.
void skip(at::mt19937& engine, uint64_t words);

// How many outputs of the stream lie between two states of one engine. At most 623.
int64_t words_between(const at::mt19937& before, const at::mt19937& after);

namespace detail {

// The two ways of `skip`: over whole blocks of 624 words.
using Block = std::array<uint32_t, at::MERSENNE_STATE_N>;
void skip_blocks(Block& state, uint64_t blocks);
void jump_blocks(Block& state, uint64_t blocks);

}  // namespace detail

}  // namespace dtensor::rng
