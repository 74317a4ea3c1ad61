#include "rng/mt19937.hpp"

namespace dtensor::rng {

namespace detail {

namespace {

constexpr int kN = at::MERSENNE_STATE_N, kM = at::MERSENNE_STATE_M;

uint32_t twist(uint32_t high, uint32_t low) { return ((high & at::UMASK) | (low & at::LMASK)) >> 1 ^ (low & 1 ? at::MATRIX_A : 0); }

}  // namespace

void skip_blocks(Block& state, uint64_t blocks) {
  auto* x = state.data();
  for (; blocks > 0; --blocks) {
    for (int i = 0; i < kN - kM; ++i) x[i] = x[i + kM] ^ twist(x[i], x[i + 1]);
    for (int i = kN - kM; i < kN - 1; ++i) x[i] = x[i + kM - kN] ^ twist(x[i], x[i + 1]);
    x[kN - 1] = x[kM - 1] ^ twist(x[kN - 1], x[0]);
  }
}

}  // namespace detail

void skip(at::mt19937& engine, uint64_t words) {
  constexpr uint64_t kFar = 20'000;  // blocks; below, going through them takes less time than a jump
  auto data = engine.data();
  const uint64_t left = data.left_ - 1;  // outputs before the next block
  if (words <= left) {
    data.next_ += words;
    data.left_ -= static_cast<int>(words);
  } else {
    words -= left + 1;  // one is the first of the next block
    const uint64_t blocks = 1 + words / detail::Block().size();
    blocks < kFar ? detail::skip_blocks(data.state_, blocks) : detail::jump_blocks(data.state_, blocks);
    data.next_ = static_cast<uint32_t>(words % detail::Block().size()) + 1;
    data.left_ = at::MERSENNE_STATE_N + 1 - static_cast<int>(data.next_);
  }
  engine.set_data(data);
}

int64_t words_between(const at::mt19937& before, const at::mt19937& after) {
  const auto a = before.data(), b = after.data();
  return a.state_ == b.state_ ? a.left_ - b.left_ : a.left_ - 1 + b.next_;
}

}  // namespace dtensor::rng
