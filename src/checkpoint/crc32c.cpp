#include <dtensor/checkpoint/crc32c.hpp>

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace dtensor::checkpoints {

namespace {

constexpr uint32_t kReversed = 0x82F63B78;  // the polynomial, lowest bit first

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t rest = i;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? kReversed : 0);
    table[i] = rest;
  }
  return table;
}
constexpr auto kTable = make_table();

// The product of two polynomials, lowest bit first, modulo that of CRC32C.
constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t bit = 1U << 31; bit != 0; bit >>= 1) {
    if (a & bit) sum ^= b;
    b = (b >> 1) ^ (b & 1 ? kReversed : 0);
  }
  return sum;
}

// x^(8 * 2^i): what a sum is multiplied by when 2^i bytes of zero follow.
constexpr std::array<uint32_t, 63> make_powers() {
  std::array<uint32_t, 63> powers{};
  powers[0] = 1U << 23;
  for (size_t i = 1; i < powers.size(); ++i) powers[i] = product(powers[i - 1], powers[i - 1]);
  return powers;
}
constexpr auto kPowers = make_powers();

// What `sum` becomes when `zeros` bytes of zero follow.
constexpr uint32_t past_zeros(uint32_t sum, int64_t zeros) {
  for (size_t i = 0; zeros > 0; ++i, zeros >>= 1) {
    if (zeros & 1) sum = product(sum, kPowers[i]);
  }
  return sum;
}

#if defined(__x86_64__)

// past_zeros() of a fixed number of them, which is linear, so by table.
template <int64_t kZeros>
struct PastRow {
  uint32_t of_byte[4][256];
  PastRow() {
    for (int byte = 0; byte < 4; ++byte) {
      for (int bit = 0; bit < 8; ++bit) of_byte[byte][1 << bit] = past_zeros(1U << (8 * byte + bit), kZeros);
      of_byte[byte][0] = 0;
      for (int i = 1; i < 256; ++i) {
        const int lowest = i & -i;
        of_byte[byte][i] = of_byte[byte][i ^ lowest] ^ of_byte[byte][lowest];
      }
    }
  }
  uint32_t operator()(uint32_t sum) const {
    return of_byte[0][sum & 0xFF] ^ of_byte[1][(sum >> 8) & 0xFF] ^ of_byte[2][(sum >> 16) & 0xFF] ^ of_byte[3][sum >> 24];
  }
};

uint64_t word_at(const char* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// The instruction takes three cycles and a new one may begin in each: three rows of a block are summed side by side. The sums of the first
// and the second are then moved past the bytes that follow. Takes as many blocks as there are.
template <size_t kRow>
__attribute__((target("sse4.2"))) void add_blocks(const char*& data, size_t& size, uint32_t& sum) {
  static const PastRow<kRow> past_row;
  for (; size >= 3 * kRow; data += 3 * kRow, size -= 3 * kRow) {
    uint64_t a = sum, b = 0, c = 0;
    for (size_t i = 0; i < kRow; i += 8) {
      a = _mm_crc32_u64(a, word_at(data + i));
      b = _mm_crc32_u64(b, word_at(data + kRow + i));
      c = _mm_crc32_u64(c, word_at(data + 2 * kRow + i));
    }
    sum = past_row(past_row(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^ static_cast<uint32_t>(c);
  }
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(const char* data, size_t size, uint32_t sum) {
  add_blocks<4096>(data, size, sum);
  add_blocks<512>(data, size, sum);
  uint64_t rest = sum;
  for (; size >= 8; data += 8, size -= 8) rest = _mm_crc32_u64(rest, word_at(data));
  sum = static_cast<uint32_t>(rest);
  for (; size > 0; ++data, --size) sum = _mm_crc32_u8(sum, static_cast<unsigned char>(*data));
  return sum;
}

#endif

}  // namespace

uint32_t crc32c_by_table(const void* data, size_t size, uint32_t before) {
  uint32_t sum = ~before;
  const auto* next = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) sum = (sum >> 8) ^ kTable[(sum ^ next[i]) & 0xFF];
  return ~sum;
}

uint32_t crc32c(const void* data, size_t size, uint32_t before) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~by_instruction(static_cast<const char*>(data), size, ~before);
#endif
  return crc32c_by_table(data, size, before);
}

void Crc32cPart::add(int64_t begin, const void* data, int64_t size) {
  sum_ = ~crc32c(data, static_cast<size_t>(size), ~past_zeros(sum_, begin - end_));
  end_ = begin + size;
}

uint32_t Crc32cPart::value(int64_t bytes) const { return past_zeros(sum_, bytes - end_); }

uint32_t crc32c_of_parts(uint32_t sum, int64_t bytes) { return ~(sum ^ past_zeros(~0U, bytes)); }

std::vector<uint32_t> crc32c_of_chunks(const void* data, int64_t bytes, int64_t chunk) {
  const auto* begin = static_cast<const char*>(data);
  std::vector<uint32_t> sums;
  for (int64_t at = 0; at < bytes; at += chunk) sums.push_back(crc32c(begin + at, static_cast<size_t>(std::min(chunk, bytes - at))));
  return sums;
}

}  // namespace dtensor::checkpoints
