// The memory of a distributed tensor, for code that uses pointers: data_ptr, accessors, storage(), torch::save. A local tensor that is the
// whole tensor lends its memory, but only when it is asked for, so other tensors pay nothing.
#include "src/dispatch/absent.hpp"
#include "src/dispatch/deferred.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/copied_views.hpp"
#include "src/dispatch/reading.hpp"
#include "src/mesh/stand_in.hpp"

#include <dtensor/dispatch/backward.hpp>
#include <dtensor/mesh/alias.hpp>

#include <dtensor/base/error.hpp>

#include <mutex>

namespace dtensor {

namespace {

// Threads may ask at once, as they may of a plain tensor.
std::mutex lending;

constexpr std::string_view kCut =
    "a distributed tensor that is cut or pending has no memory with all of its elements; got {}; expected a "
    "replicated one, or a mesh of one rank; hint: full_tensor() gathers it, to_local() is this rank's shard, "
    "dt::save of <dtensor/checkpoint/torch_files.hpp> writes it to a file, item() reads a number, and what is made under dt::NoSpmd is "
    "plain";
constexpr std::string_view kOtherwise =
    "this rank's elements of a distributed tensor are a copy, or lie in another order than the tensor is "
    "said to have; got {}; hint: clone() it first";

bool is_whole(const Layout& layout) {
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    if (layout.mesh().size(m) > 1 && !layout.placements()[m].is_replicate()) return false;
  }
  return true;
}

// Whether the elements of a part that is the whole tensor lie as the tensor reports.
bool lies_as_reported(const at::Tensor& part, const Layout& layout) {
  if (part.numel() == 0) return true;
  if (layout.is_flat()) return part.is_contiguous();
  for (int64_t d = 0; d < part.dim(); ++d) {
    if (part.size(d) > 1 && part.stride(d) != layout.strides()[d]) return false;
  }
  return true;
}

// The memory of `part` as one that has the part's first element at `offset`.
c10::Storage memory_from(const at::Tensor& part, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const auto shift = (part.storage_offset() - offset) * static_cast<int64_t>(part.element_size());
  auto* memory = static_cast<char*>(part.storage().data_ptr().get());
  if (shift == 0 || !memory) return part.storage();
  int64_t end = part.numel() > 0 ? offset + 1 : 0;
  for (size_t d = 0; d < sizes.size() && end > 0; ++d) end += (sizes[d] - 1) * strides[d];
  return detail::storage_over(memory + shift, end * static_cast<int64_t>(part.element_size()), part.device(), c10::Storage(part.storage()));
}

// Autograd asks whether it may add to a gradient in place, of one that nobody else holds, and goes on without.
bool autograd_asks(const DTensorImpl& impl) {
  return current_backward() && c10::raw::intrusive_ptr::use_count(const_cast<DTensorImpl*>(&impl)) == 1;
}

}  // namespace

DTensorImpl::Lends DTensorImpl::lend() const {
  auto& self = const_cast<DTensorImpl&>(*this);
  if (values() == Values::deferred) deferred_->refuse();
  if (values() == Values::absent && !detail::StandIn::active() && !current_backward()) dispatch::refuse_absent("data_ptr", *layout_);
  if (!is_whole(*layout_)) return Lends::cut;
  const auto& part = self.local();
  if (!part.has_storage() || dispatch::has_copied_views(part) || !lies_as_reported(part, *layout_)) return Lends::otherwise;
  dispatch::before_write(part);  // which whoever gets the pointer may do
  note_written();
  const std::lock_guard lock(lending);
  if (!storage_) {
    self.storage_ = memory_from(part, storage_offset(), sizes(), strides());
    self.lent_ = storage_.unsafeGetStorageImpl();
  }
  return Lends::memory;
}

void DTensorImpl::refuse(std::string_view asked, Lends reason) const {
  throw_error(asked, fmt::format(fmt::runtime(reason == Lends::cut ? kCut : kOtherwise), layout_->str()));
}

bool DTensorImpl::has_storage() const {
  if (!layout_) return c10::TensorImpl::has_storage();
  const auto lends = lend();
  if (lends == Lends::memory) return true;
  if (autograd_asks(*this)) return false;
  refuse("data_ptr", lends);
}

const c10::Storage& DTensorImpl::storage() const {
  if (!layout_) return storage_;
  const auto lends = lend();
  if (lends != Lends::memory) refuse("storage", lends);
  return storage_;
}

void DTensorImpl::set_storage_offset(int64_t offset) {
  c10::TensorImpl::set_storage_offset(offset);
  if (!storage_ || storage_.unsafeGetStorageImpl() == lent_) [[likely]] return;
  key_set_ = key_set_ - c10::DispatchKeySet(kDTensorKey);
  local_.reset();
  layout_.reset();
  work_.reset();
  deferred_.reset();
  values_ = Values::ready;
  member_.reset();
}

}  // namespace dtensor
