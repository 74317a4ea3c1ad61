// CRC32C (Castagnoli, polynomial 0x1EDC6F41; RFC 3720, appendix B.4): the checksum of data in checkpoints and of records of TensorBoard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::checkpoints {

// The checksum of `size` bytes that follow bytes with checksum `before`. With the processor's instructions where it has them.
uint32_t crc32c(const void* data, size_t size, uint32_t before = 0);

// The checksum of each `chunk` bytes; the last may be shorter.
std::vector<uint32_t> crc32c_of_chunks(const void* data, int64_t bytes, int64_t chunk);

// The part of a checksum that some of the bytes have. Parts of all the bytes, each known to somebody else, give that of the whole.
class Crc32cPart {
 public:
  // Bytes from place `begin` of the whole on, behind those that were added before.
  void add(int64_t begin, const void* data, int64_t size);
  // Of a whole of so many bytes.
  uint32_t value(int64_t bytes) const;

 private:
  uint32_t sum_ = 0;  // as if the bytes of others were zeros, without the inversions of a CRC32C
  int64_t end_ = 0;
};
// crc32c() of `bytes` bytes: `sum` is that of all parts, joined by ^.
uint32_t crc32c_of_parts(uint32_t sum, int64_t bytes);

// The same by table, for processors without them and for tests.
uint32_t crc32c_by_table(const void* data, size_t size, uint32_t before = 0);

}  // namespace dtensor::checkpoints

#pragma GCC visibility pop
