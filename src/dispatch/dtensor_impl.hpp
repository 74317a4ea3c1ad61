// The TensorImpl of a distributed tensor: global metadata, a local tensor and a layout; no storage, until somebody asks for one (lend.cpp).
#pragma once

#include <dtensor/base/compat.hpp>
#include <dtensor/comm/work.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <string>
#include <string_view>

namespace dtensor {

namespace dispatch {
class Deferred;
}

// Which member of which group a tensor is, or a view or cast of.
struct FlatMember : c10::intrusive_ptr_target {
  FlatMember(c10::intrusive_ptr<FlatGroup> of, int64_t i, int64_t made) : group(std::move(of)), index(i), generation(made) {}
  void release_resources() override { group.reset(); }
  c10::intrusive_ptr<FlatGroup> group;
  int64_t index;
  int64_t generation;  // of the group when the copy was made; -1: the member's own memory
};
using FlatMemberPtr = c10::intrusive_ptr<FlatMember>;

// Of a module whose parameters have been named; kept as long as the program runs. Null: none.
using ModuleName = const std::string*;

// sizes(), strides() and storage_offset() are those that the plain tensor would have; autograd addresses the gradient of a base by
// a view's strides and offset when the view was written in place.
class DTensorImpl final : public c10::TensorImpl {
 public:
  DTensorImpl(at::Tensor local, LayoutPtr layout);
  // The same, with the layout and the metadata of `like`, which need not be worked out again.
  DTensorImpl(at::Tensor local, const DTensorImpl& like);
  // No tensor, but what others can be like.
  explicit DTensorImpl(LayoutPtr layout);

  const LayoutPtr& layout() const { return layout_; }  // null: a plain tensor, see set_storage_offset

  // This rank's part, finished.
  const at::Tensor& local() {
    if (work_) [[unlikely]]
      finish();
    return local_;
  }

  // Where the part will be; may still be under way.
  void set_pending(comm::WorkPtr work) { work_ = std::move(work); }
  const at::Tensor& local_under_way() const { return local_; }
  const comm::WorkPtr& work() const { return work_; }

  const FlatMemberPtr& member() const { return member_; }
  void set_member(FlatMemberPtr member);
  void note_written() const {
    if (member_) [[unlikely]]
      member_->group->written(member_->index);
  }
  // The same tensor without a gradient, also under way.
  at::Tensor detached() const;

  // Replaces part and layout. The global metadata must stay the same, placements apart.
  void relay(at::Tensor local, LayoutPtr layout, comm::WorkPtr work = {});

  // The part on the meta device: operators work out sizes and layouts, and communicate without data.
  void forget_values();

  // The values are not there yet: local() throws, and the layout, a deferred one, is a wish.
  void defer(const c10::intrusive_ptr<dispatch::Deferred>& deferred);
  void lay_out_deferred(LayoutPtr layout) { layout_ = std::move(layout); }
  dispatch::Deferred& deferred() const;
  bool waits_for(const comm::Work& work) const { return work_.get() == &work; }

  // In InferenceMode libtorch tracks views of tensors from outside of it, and nothing else.
  void track_as(c10::DispatchKeySet base);

  // Whether nothing else shares the local memory, so that relay() cannot part a view from its base.
  bool owns_local_alone() const { return local_.use_count() == 1 && local_.storage().use_count() == (storage_ ? 2u : 1u); }

  // What reads memory by pointer asks first, and would say no more than that there is none. A part that is the whole tensor lends its
  // memory; of others both throw.
  bool has_storage() const override;
  const c10::Storage& storage() const override;
  bool lends_memory() const { return lend() == Lends::memory; }

  // libtorch's unpickler gives a tensor that a factory has made other memory, an offset and sizes, and no operator runs: it is plain from
  // then on, as inside of Spmd it may be.
  void set_storage_offset(int64_t offset) override;

  bool leaf_checked = false;  // see leaf_gradients.cpp
  bool pinned = false;        // see dtensor::pin
  bool laid_out = false;      // its layout was asked for: no operator changes it
  ModuleName module = nullptr;         // whose parameter it is, or a view of it, or a sum that is pending; see dtensor::name_module

  // Every operator makes one: the memory of those that are gone is kept for the next, a little per thread.
  static void* operator new(size_t size);
  static void operator delete(void* memory);

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                              bool allow_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool allow_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& other) override;
  void release_resources() override;

 private:
  enum class Lends { memory, cut, otherwise };
  Lends lend() const;
  [[noreturn]] void refuse(std::string_view asked, Lends reason) const;
  void replace_local(at::Tensor local);
  template <class Version>
  c10::intrusive_ptr<c10::TensorImpl> copy(Version&& version, bool allow_metadata_change) const;
  c10::intrusive_ptr<c10::TensorImpl> plain_copy(c10::VariableVersion version, bool allow_metadata_change) const;
  void adopt_metadata();
  void adopt_metadata(const DTensorImpl& like);
  void finish();

  at::Tensor local_;
  LayoutPtr layout_;
  comm::WorkPtr work_;
  FlatMemberPtr member_;
  const c10::StorageImpl* lent_ = nullptr;
};

inline bool is_dtensor_impl(const c10::TensorImpl* impl) { return impl->key_set().has(kDTensorKey); }

inline DTensorImpl* as_dtensor(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return is_dtensor_impl(impl) ? static_cast<DTensorImpl*>(impl) : nullptr;
}

// A DTensor of a local part; runs no operator.
inline at::Tensor wrap(at::Tensor local, LayoutPtr layout) {
  return at::Tensor(c10::make_intrusive<DTensorImpl>(std::move(local), std::move(layout)));
}

inline at::Tensor wrap(at::Tensor local, const DTensorImpl& like) {
  return at::Tensor(c10::make_intrusive<DTensorImpl>(std::move(local), like));
}

// A part in memory of its own size: a chunk may be a view of the whole, which is not to be kept with it.
at::Tensor in_own_memory(at::Tensor part);

// `tensor` under `target`, without a gradient. Shares no memory with `tensor`; may still be under way.
at::Tensor move_tensor(const at::Tensor& tensor, const LayoutPtr& target);

}  // namespace dtensor
