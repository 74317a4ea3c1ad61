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

// The same by table, for processors without them and for tests.
uint32_t crc32c_by_table(const void* data, size_t size, uint32_t before = 0);

}  // namespace dtensor::checkpoints

#pragma GCC visibility pop
