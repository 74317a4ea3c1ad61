// Views of plain memory, made without the dispatcher. They track no gradient: for code that works on local tensors.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#pragma GCC visibility push(default)

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

// The numbers as they are in memory, for a tensor that may be a conjugated or negated view of them.
inline c10::DispatchKeySet keys_of_memory(const at::Tensor& tensor) {
  return tensor.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
}
inline at::Tensor memory_of(const at::Tensor& tensor) {
  return alias(tensor.storage(), keys_of_memory(tensor), tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// Whether the elements lie in row-major order without gaps. Unlike is_contiguous it also looks at dims of length one (or none), so the
// answer is the same on every rank whose local tensor was made in the same way.
inline bool in_row_major_order(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t expected = 1, inner = 0;
  for (size_t d = sizes.size(); d-- > 0;) {
    const auto size = sizes[d], stride = strides[d];
    if (size > 1 ? stride != expected : stride < expected) return false;
    if (stride < inner) return false;
    inner = stride;
    expected *= size > 1 ? size : 1;
  }
  return true;
}

inline bool in_row_major_order(const at::Tensor& tensor) { return in_row_major_order(tensor.sizes(), tensor.strides()); }

inline bool in_row_major_order(const Layout& whole) {
  return whole.strides() == c10::IntArrayRef(dtensor::contiguous_strides(whole.sizes()));
}

// The same for the local tensor of a tensor that itself is (`whole`) or is not in row-major order. A pointwise operator gives an empty
// local tensor any order, and leaves strides of 0 beside others: then the order of the whole counts, as on the other ranks.
inline bool shard_in_row_major_order(const at::Tensor& part, bool whole) {
  if (part.numel() > 0) [[likely]] return in_row_major_order(part);
  const auto zeros = std::count(part.strides().begin(), part.strides().end(), 0);
  return zeros > 0 && zeros < part.dim() ? whole : in_row_major_order(part);
}

// Whether a dim of length above one has stride 0.
inline bool is_expanded(const Layout& layout) {
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    if (layout.strides()[d] == 0 && layout.sizes()[d] > 1) return true;
  }
  return false;
}

// at::narrow of a tensor with storage.
inline at::Tensor narrow(const at::Tensor& base, int64_t dim, int64_t begin, int64_t length) {
  c10::SmallVector<int64_t, 6> sizes(base.sizes().begin(), base.sizes().end());
  sizes[dim] = length;
  return alias(base, sizes, base.strides(), base.storage_offset() + begin * base.strides()[dim]);
}

// A storage over memory that `keeper` keeps alive.
template <class Keeper>
c10::Storage storage_over(void* memory, int64_t bytes, c10::Device device, Keeper keeper) {
  auto* held = new Keeper(std::move(keeper));
  return {c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
          c10::DataPtr(memory, held, [](void* context) { delete static_cast<Keeper*>(context); }, device), nullptr, false};
}

// A contiguous tensor over such a storage.
inline at::Tensor over(const at::Tensor& like, c10::Storage storage, c10::IntArrayRef sizes) {
  return alias(std::move(storage), like.key_set(), like.dtype(), sizes, dtensor::contiguous_strides(sizes), 0);
}

// The elements of a flat buffer from `begin` on, as a tensor with a storage of its own, so that it is no view. The storage keeps the
// buffer alive.
inline at::Tensor shard_in_buffer(const at::Tensor& buffer, int64_t begin, c10::IntArrayRef sizes) {
  const auto width = static_cast<int64_t>(buffer.element_size());
  auto* memory = static_cast<char*>(buffer.data_ptr());  // null on the meta device
  return over(
      buffer,
      storage_over(memory ? memory + begin * width : nullptr, c10::multiply_integers(sizes) * width, buffer.device(), at::Tensor(buffer)),
      sizes);
}

}  // namespace dtensor::detail

#pragma GCC visibility pop
