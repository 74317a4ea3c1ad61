// CRC32C (Castagnoli, polynomial 0x1EDC6F41; RFC 3720, appendix B.4): the checksum of data in checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtensor::checkpoints {

// The checksum of `size` bytes that follow bytes with checksum `before`. With the processor's instructions where it has them.
uint32_t crc32c(const void* data, size_t size, uint32_t before = 0);

// The same by table, for processors without them and for tests.
uint32_t crc32c_by_table(const void* data, size_t size, uint32_t before = 0);

}  // namespace dtensor::checkpoints
