// Views of plain memory, made without the dispatcher. They track no gradient: for code that works on local parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace dtensor::detail {

inline at::Tensor alias(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t storage_offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  impl->set_storage_offset(storage_offset);
  impl->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(impl));
}

// at::narrow of a tensor with storage.
inline at::Tensor narrow(const at::Tensor& base, int64_t dim, int64_t begin, int64_t length) {
  c10::SmallVector<int64_t, 6> sizes(base.sizes().begin(), base.sizes().end());
  sizes[dim] = length;
  return alias(base, sizes, base.strides(), base.storage_offset() + begin * base.strides()[dim]);
}

}  // namespace dtensor::detail
