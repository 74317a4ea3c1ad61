// Views of plain memory, made without the dispatcher. They track no gradient: for code that works on local parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace dtensor::detail {

inline at::Tensor alias(c10::Storage memory, c10::DispatchKeySet keys, caffe2::TypeMeta dtype, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides, int64_t storage_offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(memory), keys, dtype);
  impl->set_storage_offset(storage_offset);
  impl->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(impl));
}

inline at::Tensor alias(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t storage_offset) {
  return alias(base.storage(), base.key_set(), base.dtype(), sizes, strides, storage_offset);
}

// What lies in a tensor's memory, where the tensor may be seen as conjugated or negated.
inline c10::DispatchKeySet keys_of_memory(const at::Tensor& tensor) {
  return tensor.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
}
inline at::Tensor memory_of(const at::Tensor& tensor) {
  return alias(tensor.storage(), keys_of_memory(tensor), tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// Whether the elements lie in row-major order without gaps. Says the same on every rank whose part of a tensor was made in the same
// way: a dim of length one (or none) does not excuse another order, as it does for is_contiguous.
inline bool in_row_major_order(const at::Tensor& tensor) {
  int64_t expected = 1, inner = 0;
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    const auto size = tensor.size(d), stride = tensor.stride(d);
    if (size > 1 ? stride != expected : stride < expected) return false;
    if (stride < inner) return false;
    inner = stride;
    expected *= size > 1 ? size : 1;
  }
  return true;
}

// at::narrow of a tensor with storage.
inline at::Tensor narrow(const at::Tensor& base, int64_t dim, int64_t begin, int64_t length) {
  c10::SmallVector<int64_t, 6> sizes(base.sizes().begin(), base.sizes().end());
  sizes[dim] = length;
  return alias(base, sizes, base.strides(), base.storage_offset() + begin * base.strides()[dim]);
}

}  // namespace dtensor::detail
