// Writing to a distributed tensor's local memory, past the operators.
#pragma once

#include <ATen/core/Tensor.h>

#pragma GCC visibility push(default)

namespace dtensor {

// The local tensor of a distributed one, to be written at once: moves that still read the memory have ended, a unit of fully_shard that
// holds a gathered copy drops it, and autograd counts a write. Of a plain tensor the same without its gradient. Communicates nothing.
// Throws for a tensor that is deferred or absent.
at::Tensor local_to_write(const at::Tensor& tensor);

}  // namespace dtensor

#pragma GCC visibility pop
