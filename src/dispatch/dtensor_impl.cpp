#include "src/dispatch/dtensor_impl.hpp"

#include "src/dispatch/guard.hpp"

#include <dtensor/error.hpp>
#include <dtensor/redistribute.hpp>

namespace dtensor {

namespace {

// The device's dense key makes that device's autograd kernels apply (TensorImpl adds them); ours sits below those.
c10::DispatchKeySet keys_of(const at::Tensor& local) {
  return c10::DispatchKeySet(kDTensorKey) |
         (local.key_set() & (c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask) |
                             c10::DispatchKeySet(c10::DispatchKey::Dense)));
}

}  // namespace

DTensorImpl::DTensorImpl(at::Tensor local, LayoutPtr layout)
    : c10::TensorImpl(keys_of(local), local.dtype(), local.device()), local_(std::move(local)), layout_(std::move(layout)) {
  set_storage_access_should_throw();
  adopt_metadata();
}

void DTensorImpl::adopt_metadata() { set_sizes_and_strides(layout_->sizes(), layout_->strides()); }

void DTensorImpl::relay(at::Tensor local, LayoutPtr layout, comm::WorkPtr work) {
  local_ = std::move(local);
  layout_ = std::move(layout);
  work_ = std::move(work);
}

void DTensorImpl::finish() {
  auto work = std::move(work_);
  work->wait();
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::copy(Version&& version, bool allow_metadata_change) const {
  auto impl = c10::make_intrusive<DTensorImpl>(local_, layout_);
  impl->work_ = work_;
  impl->set_storage_offset(storage_offset());
  impl->set_version_counter(std::forward<Version>(version));
  impl->set_allow_tensor_metadata_change(allow_metadata_change);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                         bool allow_metadata_change) const {
  return copy(version, allow_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                         bool allow_metadata_change) const {
  return copy(std::move(version), allow_metadata_change);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) {
  require(is_dtensor_impl(other.get()), "set_data",
          "a distributed tensor cannot take the data of a plain one; hint: distribute it first with distribute_tensor");
  auto* source = static_cast<DTensorImpl*>(other.get());
  local_ = source->local_;
  layout_ = source->layout_;
  work_ = source->work_;
  data_type_ = source->data_type_;
  adopt_metadata();
  set_storage_offset(source->storage_offset());
}

void DTensorImpl::release_resources() {
  c10::TensorImpl::release_resources();
  local_.reset();
  layout_.reset();
  work_.reset();
}

at::Tensor move_tensor(const at::Tensor& tensor, const LayoutPtr& target) {
  auto* impl = as_dtensor(tensor);
  const auto& local = impl->local();
  dispatch::LocalMode local_mode;
  auto moved = move_local(local, impl->layout(), target);
  if (!moved.work && moved.tensor.is_alias_of(local)) moved.tensor = moved.tensor.clone();
  auto result = wrap(std::move(moved.tensor), target);
  as_dtensor(result)->set_pending(std::move(moved.work));
  return result;
}

}  // namespace dtensor
