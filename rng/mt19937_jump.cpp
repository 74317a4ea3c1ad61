// Moves the Mersenne Twister far ahead in one jump. Its state moves by a linear map T over GF(2), whose characteristic polynomial P has
// degree 19937. So T^n = g(T) with g = x^n mod P, and the state after n words is the sum of the states after k words for all k for which g
// has the term x^k (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number Generators",
// 2008).
#include "rng/mt19937.hpp"

#include <range/v3/action/push_back.hpp>

#include <bit>
#include <utility>
#include <vector>

namespace dtensor::rng::detail {

namespace {

constexpr int kDegree = 19937;
constexpr int kWords = (kDegree + 63) / 64;

// Polynomials over GF(2), the bit k of which is the coefficient of x^k.
using Bits = std::vector<uint64_t>;

bool bit(const Bits& bits, int64_t at) { return bits[at / 64] >> (at % 64) & 1; }

// bits ^= word << at
void add_shifted(Bits& bits, uint64_t word, int64_t at) {
  bits[at / 64] ^= word << (at % 64);
  if (at % 64 != 0) bits[at / 64 + 1] ^= word >> (64 - at % 64);
}

void shift_up(Bits& bits, uint64_t carry) {
  for (auto& word : bits) {
    const uint64_t next = word >> 63;
    word = word << 1 | carry;
    carry = next;
  }
}

// The exponents of P below the highest, found from the lowest bits of 2 * 19937 outputs by the algorithm of Berlekamp and Massey.
std::vector<int> characteristic_exponents() {
  Block state{};
  state[1] = 1;
  skip_blocks(state, 2);
  Bits connection(kWords + 1), before(kWords + 1), past(kWords + 1);  // past: bit i is the output i steps ago
  connection[0] = before[0] = 1;
  int length = 0;
  for (int step = 0; step < 2 * kDegree; ++step) {
    if (step > 0 && step % at::MERSENNE_STATE_N == 0) skip_blocks(state, 1);
    shift_up(past, state[step % at::MERSENNE_STATE_N] & 1);
    shift_up(before, 0);
    uint64_t discrepancy = 0;
    for (size_t i = 0; i < past.size(); ++i) discrepancy ^= connection[i] & past[i];
    if (std::popcount(discrepancy) % 2 == 0) continue;
    const auto old = connection;
    for (size_t i = 0; i < before.size(); ++i) connection[i] ^= before[i];
    if (2 * length > step) continue;
    length = step + 1 - length;
    before = old;
  }
  std::vector<int> exponents;  // of the connection polynomial read backwards
  for (int i = 1; i <= kDegree; ++i) {
    if (bit(connection, i)) exponents.push_back(kDegree - i);
  }
  return exponents;
}

// Brings a polynomial of a degree below 2 * 19937 below 19937. The second highest term of P is more than 64 below the highest, so
// that whole words can be folded down.
void reduce(Bits& bits, const std::vector<int>& exponents) {
  const auto fold = [&](uint64_t word, int64_t at) {
    for (const int exponent : exponents) add_shifted(bits, word, at - kDegree + exponent);
  };
  for (int64_t i = static_cast<int64_t>(bits.size()) - 1; i >= kWords; --i) fold(std::exchange(bits[i], 0), i * 64);
  const int kept = kDegree % 64;
  const uint64_t top = bits[kWords - 1] >> kept;
  bits[kWords - 1] ^= top << kept;
  fold(top, kDegree);
}

Bits square(const Bits& bits) {
  const auto spread = [](uint64_t half) {  // bit i of 32 goes to bit 2 i
    half = (half | half << 16) & 0x0000ffff0000ffff;
    half = (half | half << 8) & 0x00ff00ff00ff00ff;
    half = (half | half << 4) & 0x0f0f0f0f0f0f0f0f;
    half = (half | half << 2) & 0x3333333333333333;
    return (half | half << 1) & 0x5555555555555555;
  };
  Bits result(2 * kWords);
  for (int i = 0; i < kWords; ++i) {
    result[2 * i] = spread(bits[i] & 0xffffffff);
    result[2 * i + 1] = spread(bits[i] >> 32);
  }
  return result;
}

// x^n mod P
Bits power(uint64_t n, const std::vector<int>& exponents) {
  Bits result(kWords + 1);
  result[0] = 1;
  for (int i = 63 - std::countl_zero(n); i >= 0; --i) {
    result.resize(kWords);
    result = square(result);
    if (n >> i & 1) shift_up(result, 0);
    reduce(result, exponents);
  }
  return result;
}

}  // namespace

void jump_blocks(Block& state, uint64_t blocks) {
  static const auto exponents = characteristic_exponents();
  skip_blocks(state, 1);  // the lower bits of a seed's first word are no part of the state
  if (--blocks == 0) return;
  const auto g = power(blocks * state.size(), exponents);
  std::vector<uint32_t> words;  // the stream from the state on
  for (auto block = state; words.size() < kDegree + state.size(); skip_blocks(block, 1)) {
    ranges::push_back(words, block);
  }
  state = {};
  for (int k = 0; k < kDegree; ++k) {
    if (!bit(g, k)) continue;
    for (size_t i = 0; i < state.size(); ++i) state[i] ^= words[k + i];
  }
}

}  // namespace dtensor::rng::detail
