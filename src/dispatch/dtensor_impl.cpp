#include "src/dispatch/dtensor_impl.hpp"

#include "src/base/fast_thread_local.hpp"
#include "src/dispatch/absent.hpp"
#include "src/dispatch/deferred.hpp"
#include "src/dispatch/execute.hpp"
#include "src/dispatch/operator_event.hpp"
#include "src/dispatch/reading.hpp"

#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/redistribute/between_meshes.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <array>

namespace dtensor {

namespace {

// The device's dense key makes that device's autograd kernels apply (TensorImpl adds them); ours sits below those.
c10::DispatchKeySet keys_of(const at::Tensor& local) {
  return c10::DispatchKeySet(kDTensorKey) | (local.key_set() & (c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask) |
                                                                c10::DispatchKeySet(c10::DispatchKey::Dense)));
}

// Memory of DTensorImpls that are gone, to be used again.
class Pool {
 public:
  Pool() { current = this; }
  ~Pool() {
    current = nullptr;
    while (count_ > 0) ::operator delete(kept_[--count_]);
  }
  void* take() { return count_ > 0 ? kept_[--count_] : nullptr; }
  bool keep(void* memory) { return count_ < kept_.size() && (kept_[count_++] = memory, true); }

  static Pool* of_this_thread() {
    if (current) [[likely]]
      return current;
    static thread_local Pool pool;
    return current;  // null while the thread ends
  }

 private:
  static DTENSOR_FAST_THREAD_LOCAL Pool* current;
  std::array<void*, 64> kept_;
  size_t count_ = 0;
};

DTENSOR_FAST_THREAD_LOCAL Pool* Pool::current = nullptr;

}  // namespace

void* DTensorImpl::operator new(size_t size) {
  auto* pool = Pool::of_this_thread();
  void* memory = pool ? pool->take() : nullptr;
  return memory ? memory : ::operator new(size);
}

void DTensorImpl::operator delete(void* memory) {
  auto* pool = Pool::of_this_thread();
  if (!pool || !pool->keep(memory)) ::operator delete(memory);
}

DTensorImpl::DTensorImpl(at::Tensor local, LayoutPtr layout)
    : c10::TensorImpl(keys_of(local), local.dtype(), local.device()), local_(std::move(local)), layout_(std::move(layout)) {
  adopt_metadata();
}

DTensorImpl::DTensorImpl(at::Tensor local, const DTensorImpl& like)
    : c10::TensorImpl(keys_of(local), local.dtype(), local.device()), local_(std::move(local)), layout_(like.layout_) {
  adopt_metadata(like);
}

DTensorImpl::DTensorImpl(LayoutPtr layout)
    : c10::TensorImpl(c10::DispatchKeySet(kDTensorKey), c10::scalarTypeToTypeMeta(layout->dtype()),
                      c10::Device(layout->mesh().device_type())),
      layout_(std::move(layout)) {
  adopt_metadata();
}

void DTensorImpl::adopt_metadata(const DTensorImpl& like) {
  sizes_and_strides_ = like.sizes_and_strides_;
  numel_ = like.numel_;
  is_contiguous_ = like.is_contiguous_;
  is_channels_last_ = like.is_channels_last_;
  is_channels_last_contiguous_ = like.is_channels_last_contiguous_;
  is_channels_last_3d_ = like.is_channels_last_3d_;
  is_channels_last_3d_contiguous_ = like.is_channels_last_3d_contiguous_;
  is_non_overlapping_and_dense_ = like.is_non_overlapping_and_dense_;
}

void DTensorImpl::adopt_metadata() { set_sizes_and_strides(layout_->sizes(), layout_->strides()); }

// What was lent is that of the part before.
void DTensorImpl::replace_local(at::Tensor local) {
  local_ = std::move(local);
  if (storage_) [[unlikely]] storage_ = {};
}

void DTensorImpl::set_local(at::Tensor local, LayoutPtr layout, comm::WorkPtr work) {
  replace_local(std::move(local));
  layout_ = std::move(layout);
  deferred_.reset();
  set_pending(std::move(work));
  note_written();
}

at::Tensor DTensorImpl::detached() const {
  auto impl = c10::make_intrusive<DTensorImpl>(local_, *this);
  impl->set_pending(work_);
  impl->inherit(*this);
  if (storage_offset() != 0) impl->set_storage_offset(storage_offset());
  return at::Tensor(std::move(impl));
}

void DTensorImpl::forget_values() {
  LocalMode local_mode;
  const auto layout = layout_->present();
  const auto part = at::empty(layout->local_sizes(), at::TensorOptions(at::kMeta).dtype(layout->dtype()));
  const auto like = wrap(part, layout);
  set_local(part, layout);
  key_set_ = like.key_set();
  device_opt_ = like.device();
}

void DTensorImpl::inherit(const DTensorImpl& operand) {
  if (operand.member_) [[unlikely]] set_member(operand.member_);
  pinned = operand.pinned;
  laid_out = operand.laid_out;
  module = operand.module;
  track_as(operand.key_set());
}

// In InferenceMode libtorch tracks views of tensors from outside of it, and nothing else.
void DTensorImpl::track_as(c10::DispatchKeySet base) {
  if (!is_inference()) [[likely]] return;
  key_set_ = key_set_ | (base & (c10::autograd_dispatch_keyset | c10::inplace_or_view_ks));
  if (!is_inference()) version_counter_ = c10::VariableVersion(0);
}

// Autograd and autocast go by the device that a tensor is said to be on.
void DTensorImpl::set_member(FlatMemberPtr member) {
  member_ = std::move(member);
  const auto device = member_ ? member_->group->device() : c10::nullopt;
  if (!device || *device == this->device()) return;
  const c10::DispatchKeySet keys{kDTensorKey, c10::computeDispatchKey(c10::nullopt, c10::nullopt, *device)};
  key_set_ = c10::make_intrusive<c10::TensorImpl>(keys, data_type_, *device)->key_set();
  device_opt_ = *device;
}

void DTensorImpl::finish() {
  if (values_ == Values::deferred) deferred_->refuse();
  const auto work = work_;
  dispatch::no_longer_reading(work);
  work->wait();
  set_pending({});
}

void DTensorImpl::defer(c10::intrusive_ptr<dispatch::Deferred> deferred) {
  deferred_ = std::move(deferred);
  deferred_->add_handle(*this);
  values_ = Values::deferred;
}

// Where the other tensor waits for its values, so does this one.
void DTensorImpl::share_values(const DTensorImpl& other) {
  work_ = other.work_;
  deferred_ = other.deferred_;
  values_ = other.values_;
  if (deferred_) deferred_->add_handle(*this);
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::copy(Version&& version, bool allow_metadata_change) const {
  if (!layout_) [[unlikely]] return plain_copy(std::forward<Version>(version), allow_metadata_change);
  auto impl = c10::make_intrusive<DTensorImpl>(local_, layout_);
  impl->share_values(*this);
  impl->inherit(*this);
  impl->set_storage_offset(storage_offset());
  impl->set_version_counter(std::forward<Version>(version));
  impl->set_allow_tensor_metadata_change(allow_metadata_change);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::plain_copy(c10::VariableVersion version, bool allow_metadata_change) const {
  auto impl = detail::alias(storage_, key_set_, data_type_, sizes(), strides(), storage_offset()).getIntrusivePtr();
  impl->set_version_counter(std::move(version));
  impl->set_allow_tensor_metadata_change(allow_metadata_change);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                         bool allow_metadata_change) const {
  return copy(version, allow_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version, bool allow_metadata_change) const {
  return copy(std::move(version), allow_metadata_change);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) {
  if (!layout_) return c10::TensorImpl::shallow_copy_from(other);
  require(is_dtensor_impl(other.get()), "set_data",
          "a distributed tensor cannot take the data of a plain one; hint: distribute it first with distribute_tensor");
  auto* source = static_cast<DTensorImpl*>(other.get());
  const bool of_group = member_ && member_->generation < 0 && !layout_->is_deferred();
  if (of_group && source->layout_ != layout_) {
    fail("set_data",
         "a parameter of a unit of fully_shard keeps its dtype and layout; got {}; expected {}; hint: call to() before fully_shard, or "
         "write to "
         "the parameter with copy_",
         source->layout_->str(), layout_->str());
  }
  replace_local(source->local_);
  layout_ = source->layout_;
  share_values(*source);
  note_written();
  data_type_ = source->data_type_;
  adopt_metadata();
  set_storage_offset(source->storage_offset());
}

void DTensorImpl::release_resources() {
  c10::TensorImpl::release_resources();
  local_.reset();
  layout_.reset();
  work_.reset();
  deferred_.reset();
  member_.reset();
}

at::Tensor in_own_memory(at::Tensor part) {
  if (part.storage().nbytes() <= static_cast<size_t>(part.numel()) * part.element_size()) return part;
  LocalMode local_mode;
  return part.clone();
}

namespace {

// Where a pending value lies once it has been reduced, before it leaves its mesh: cut, so that what each rank then sends is its own.
LayoutPtr reduced(const LayoutPtr& layout) {
  if (!layout->has_partial()) return layout;
  auto placements = without_partial(layout->placements());
  int64_t parts = 1;
  for (size_t m = 0; m < placements.size(); ++m)
    parts *= layout->placements()[m].is_partial() ? layout->mesh().size(static_cast<int64_t>(m)) : 1;
  const auto sizes = layout->sizes();
  const auto longest = std::ranges::max_element(sizes);
  const bool uncut = std::ranges::none_of(placements, [](const Placement& p) { return p.cuts(); });
  for (size_t m = 0; uncut && longest != sizes.end() && *longest >= parts && m < placements.size(); ++m) {
    if (layout->placements()[m].is_partial()) placements[m] = shard(longest - sizes.begin());
  }
  return layout->with(placements);
}

at::Tensor move_between(const at::Tensor& tensor, const LayoutPtr& target) {
  const auto& layout = as_dtensor(tensor)->layout();
  if (layout->has_partial()) return move_between(move_tensor(tensor, reduced(layout)), target);
  LocalMode local_mode;
  const auto local = layout->is_absent() ? at::Tensor() : as_dtensor(tensor)->local();
  auto moved = move_local_between(local, layout, target);
  if (target->is_absent()) return dispatch::absent(target);
  if (!moved.work) moved.tensor = dispatch::in_reported_order(std::move(moved.tensor), *target);
  auto result = wrap(std::move(moved.tensor), target);
  as_dtensor(result)->set_pending(std::move(moved.work));
  return result;
}

}  // namespace

at::Tensor move_tensor(const at::Tensor& tensor, const LayoutPtr& target) {
  auto* impl = as_dtensor(tensor);
  if (!(impl->layout()->mesh() == target->mesh())) return move_between(tensor, target);
  if (target->is_absent()) return dispatch::absent(target);
  const auto& local = impl->local();
  LocalMode local_mode;
  const comm::Cause cause(comm::Cause::op(), comm::Cause::implicit(), dispatch::text_of(impl->module));
  auto moved = move_local(local, impl->layout(), target);
  if (!moved.work && moved.tensor.is_alias_of(local)) moved.tensor = moved.tensor.clone();
  if (!moved.work) moved.tensor = dispatch::in_reported_order(std::move(moved.tensor), *target);
  auto result = wrap(std::move(moved.tensor), target);
  if (moved.work) dispatch::reading(local, moved.work);
  else dispatch::order_if_thin(*as_dtensor(result));
  as_dtensor(result)->set_pending(std::move(moved.work));
  return result;
}

}  // namespace dtensor
