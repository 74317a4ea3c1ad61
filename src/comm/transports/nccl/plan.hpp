// Expresses a collective in NCCL's terms: element types, operations, and the pieces of ragged collectives. Plain C++, without CUDA.
#pragma once

#include <dtensor/comm/communicator.hpp>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace dtensor::comm::nccl {

// The types in which NCCL reduces. What is only moved goes as bytes, whatever its dtype.
enum class Wire : uint8_t { int8, uint8, int32, int64, float16, bfloat16, float32, float64 };

struct Reduction {
  Wire type;
  ReduceOp op;        // sum, avg, product, min or max
  int64_t width = 1;  // numbers in one element
};

// How to reduce elements of `dtype`. bool: sum and max are the larger byte, product and min the smaller one. Complex numbers are pairs.
// Throws for what NCCL cannot do as other transports do it: int16, averages of integers, products of complex numbers.
Reduction reduction_of(Collective kind, c10::ScalarType dtype, ReduceOp op);

// Elements [offset, offset + count) of a flat tensor belong to `peer`.
struct Piece {
  int peer;
  int64_t offset, count;
  bool operator==(const Piece& other) const = default;
};

// The pieces that are not empty, in the order of ranks.
std::vector<Piece> pieces_of(Counts counts);

// Whether one call of NCCL does it without a list of pieces.
bool are_equal(Counts counts);

// Throws unless `tag` is 0: NCCL's messages have none.
void check_tag(Collective kind, int tag);

}  // namespace dtensor::comm::nccl
