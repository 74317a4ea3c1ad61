// Tables of types and operations, and the pieces of ragged collectives.
#include "src/comm/transports/nccl/plan.hpp"

#include <dtensor/base/error.hpp>

#include <algorithm>
#include <optional>

namespace dtensor::comm::nccl {

namespace {

using S = c10::ScalarType;

struct Numbers {
  Wire type;
  int64_t width = 1;
};

std::optional<Numbers> numbers_of(S dtype) {
  switch (dtype) {
    case S::Bool:
    case S::Byte: return Numbers{Wire::uint8};
    case S::Char: return Numbers{Wire::int8};
    case S::Int: return Numbers{Wire::int32};
    case S::Long: return Numbers{Wire::int64};
    case S::Half: return Numbers{Wire::float16};
    case S::BFloat16: return Numbers{Wire::bfloat16};
    case S::Float: return Numbers{Wire::float32};
    case S::Double: return Numbers{Wire::float64};
    case S::ComplexFloat: return Numbers{Wire::float32, 2};
    case S::ComplexDouble: return Numbers{Wire::float64, 2};
    default: return std::nullopt;
  }
}

// A bool is a byte that is 0 or 1.
ReduceOp op_of_bools(ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::max ? ReduceOp::max : ReduceOp::min; }

}  // namespace

Reduction reduction_of(Collective kind, S dtype, ReduceOp op) {
  const auto numbers = numbers_of(dtype);
  if (!numbers) {
    fail(name(kind), "NCCL does not reduce {}; hint: convert to {}", c10::toString(dtype),
         dtype == S::Short ? "int32" : "a type that it has");
  }
  if (op == ReduceOp::product && c10::isComplexType(dtype)) {
    fail(name(kind), "NCCL has no product of complex numbers; got {}; hint: gather them and multiply", c10::toString(dtype));
  }
  if (op == ReduceOp::avg && c10::isIntegralType(dtype, true)) {
    fail(name(kind),
         "NCCL's average of integers is not used, since its versions round differently; got {}; hint: take the sum and divide it",
         c10::toString(dtype));
  }
  return {numbers->type, dtype == S::Bool ? op_of_bools(op) : op, numbers->width};
}

std::vector<Piece> pieces_of(Counts counts) {
  std::vector<Piece> pieces;
  int64_t offset = 0;
  for (size_t rank = 0; rank < counts.size(); offset += counts[rank++]) {
    if (counts[rank] > 0) pieces.push_back({static_cast<int>(rank), offset, counts[rank]});
  }
  return pieces;
}

bool are_equal(Counts counts) { return std::ranges::all_of(counts, [&](int64_t count) { return count == counts.front(); }); }

void check_tag(Collective kind, int tag) {
  if (tag == 0) return;
  fail(name(kind), "NCCL's messages have no tags: those from one rank to another arrive in the order in which they were sent; got tag {}; "
       "expected 0; hint: send CPU tensors, which may have tags, or receive in the order of the sends", tag);
}

}  // namespace dtensor::comm::nccl
