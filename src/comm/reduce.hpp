// The arithmetic of reductions on the CPU. All transports share it, so they give the same bits.
#pragma once

#include <dtensor/base/reduce_op.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace dtensor::comm {

// out[i] = inputs[0][i] op inputs[1][i] op ..., in that order, for i < count. float16 and bfloat16 accumulate in float32
// and round once; avg divides once at the end (each part, where finite ones have an infinite sum), of
// integers their sum in 64 bits. bool: sum and max are "or", product and min are "and". `out` may be one of the inputs.
void reduce(c10::ScalarType dtype, ReduceOp op, void* out, c10::ArrayRef<const void*> inputs, int64_t count);

// Throws when `op` has no meaning for `dtype` (avg of bool, min or max of complex, norm2, dtypes that are not numbers).
void check_reducible(std::string_view tag, c10::ScalarType dtype, ReduceOp op);

// A new CPU tensor, uninitialized. Does not dispatch, so no interception of operators sees it.
at::Tensor empty(c10::IntArrayRef sizes, c10::ScalarType dtype);
// The same, on the input's device.
at::Tensor empty_for(const at::Tensor& input, c10::IntArrayRef sizes);
// Copies all elements, which lie alike, on the device that both are on. Does not dispatch either.
void copy(const at::Tensor& to, const at::Tensor& from);

}  // namespace dtensor::comm
