// The CRC-32 of zip archives (polynomial 0x04C11DB7, ISO 3309), which torch.save's files are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dtensor::files {

// Eight bytes at a time.
class Crc32 {
 public:
  void add(const char* data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
      uint64_t word = 0;
      std::memcpy(&word, data, 8);
      word ^= sum_;
      sum_ = 0;
      for (size_t i = 0; i < 8; ++i) sum_ ^= kTables[7 - i][word >> (8 * i) & 255];
    }
    for (; size > 0; ++data, --size) sum_ = sum_ >> 8 ^ kTables[0][(sum_ ^ static_cast<uint8_t>(*data)) & 255];
  }
  uint32_t get() const { return ~sum_; }

 private:
  using Tables = std::array<std::array<uint32_t, 256>, 8>;
  static constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t sum = i;
      for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
      tables[0][i] = sum;
    }
    for (size_t t = 1; t < 8; ++t) {
      for (uint32_t i = 0; i < 256; ++i) tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
    }
    return tables;
  }
  static const Tables kTables;
  uint32_t sum_ = ~uint32_t{0};
};

inline constexpr Crc32::Tables Crc32::kTables = Crc32::make_tables();

}  // namespace dtensor::files
