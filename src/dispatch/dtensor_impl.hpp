// The TensorImpl of a distributed tensor: global metadata, a local tensor and a layout. It has no storage until one is asked for
// (lend.cpp).
#pragma once

#include <dtensor/base/compat.hpp>
#include <dtensor/comm/work.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/mesh/layout.hpp>

#include "src/dispatch/deferred_values.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <string>
#include <string_view>

namespace dtensor {

// The group and index of a member; a view or cast of a member has them too.
struct FlatMember : c10::intrusive_ptr_target {
  FlatMember(c10::intrusive_ptr<FlatGroup> of, int64_t i, int64_t made) : group(std::move(of)), index(i), generation(made) {}
  void release_resources() override { group.reset(); }
  c10::intrusive_ptr<FlatGroup> group;
  int64_t index;
  int64_t generation;  // of the group when the copy was made; -1: the member's own memory
};
using FlatMemberPtr = c10::intrusive_ptr<FlatMember>;

// The name of a module whose parameters were named. Names stay as long as the program runs. Null: none.
using ModuleName = const std::string*;

// What this rank has of a tensor's values: `pending` while communication brings them, `deferred` until they are materialized, `absent` on
// ranks that are not in the mesh.
enum class Values : uint8_t { ready, absent, pending, deferred };

// sizes(), strides() and storage_offset() are those that the plain tensor would have. Autograd needs them: after an in-place write to a
// view it addresses the base's gradient by the view's strides and offset.
class DTensorImpl final : public c10::TensorImpl {
 public:
  DTensorImpl(at::Tensor local, LayoutPtr layout);
  // The same, with the layout and metadata of `like`, which saves computing them.
  DTensorImpl(at::Tensor local, const DTensorImpl& like);
  // Not a tensor, but a template: a `like` for others.
  explicit DTensorImpl(LayoutPtr layout);

  const LayoutPtr& layout() const { return layout_; }  // null: a plain tensor, see set_storage_offset

  Values values() const { return layout_->is_absent() ? Values::absent : values_; }

  // This rank's local tensor. Waits for pending values, and throws where they are deferred. Where they are absent it is on the meta device.
  const at::Tensor& local() {
    if (values_ != Values::ready) [[unlikely]] finish();
    return local_;
  }

  // The local tensor, which `work` is still filling; without work its values are ready.
  void set_pending(comm::WorkPtr work) {
    work_ = std::move(work);
    values_ = work_ ? Values::pending : Values::ready;
  }
  const at::Tensor& local_under_way() const { return local_; }
  const comm::WorkPtr& work() const { return work_; }

  const FlatMemberPtr& member() const { return member_; }
  void set_member(FlatMemberPtr member);
  void note_written() const {
    if (member_) [[unlikely]]
      member_->group->written(member_->index);
  }
  // The same tensor without a gradient. Does not wait for the local tensor.
  at::Tensor detached() const;

  // Replaces local tensor and layout. Of the global metadata, only placements may change.
  void set_local(at::Tensor local, LayoutPtr layout, comm::WorkPtr work = {});

  // Puts the local tensor on the meta device: operators then compute sizes and layouts only, and communicate without data.
  void forget_values();

  // Marks the values as not there yet. The layout, a deferred one, says how the tensor is to be laid out.
  void defer(c10::intrusive_ptr<dispatch::Deferred> deferred);
  void lay_out_deferred(LayoutPtr layout) { layout_ = std::move(layout); }
  dispatch::Deferred& deferred() const { return *deferred_; }
  bool waits_for(const dispatch::Deferred& deferred) const { return deferred_.get() == &deferred; }

  // Takes over what views and copies of `operand` have of it beside values and layout: its group, whether it is pinned or laid out, and how
  // InferenceMode tracks it.
  void inherit(const DTensorImpl& operand);

  // Whether nothing else shares the local memory, so that set_local() cannot separate a view from its base.
  bool owns_local_alone() const { return local_.use_count() == 1 && local_.storage().use_count() == (storage_ ? 2u : 1u); }

  // libtorch calls these before it reads memory by pointer. If the local tensor is the whole tensor, it lends its memory. Otherwise both
  // throw an error that says more than libtorch's would.
  bool has_storage() const override;
  const c10::Storage& storage() const override;
  bool lends_memory() const { return lend() == Lends::memory; }

  // libtorch's unpickler makes a tensor by a factory and then gives it other memory, an offset and sizes, without running an operator. The
  // tensor is plain from then on, which is allowed inside Spmd.
  void set_storage_offset(int64_t offset) override;

  bool leaf_checked = false;  // see leaf_gradients.cpp
  bool pinned = false;        // see dtensor::pin
  bool laid_out = false;      // the user asked for its layout: no operator changes it
  ModuleName module = nullptr;  // whose parameter it is, or a view of it, or a sum that is pending; see dtensor::name_module

  // Every operator makes one, so each thread keeps the memory of a few destroyed ones for the next.
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
  void track_as(c10::DispatchKeySet base);
  void adopt_metadata();
  void adopt_metadata(const DTensorImpl& like);
  void finish();
  void share_values(const DTensorImpl& other);

  at::Tensor local_;
  LayoutPtr layout_;
  comm::WorkPtr work_;                               // of pending values
  c10::intrusive_ptr<dispatch::Deferred> deferred_;  // of deferred ones
  FlatMemberPtr member_;
  const c10::StorageImpl* lent_ = nullptr;
  Values values_ = Values::ready;  // never absent: the layout says that
};

inline bool is_dtensor_impl(const c10::TensorImpl* impl) { return impl->key_set().has(kDTensorKey); }

inline DTensorImpl* as_dtensor(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return is_dtensor_impl(impl) ? static_cast<DTensorImpl*>(impl) : nullptr;
}

// Makes a DTensor of a local tensor; runs no operator.
inline at::Tensor wrap(at::Tensor local, LayoutPtr layout) {
  return at::Tensor(c10::make_intrusive<DTensorImpl>(std::move(local), std::move(layout)));
}

inline at::Tensor wrap(at::Tensor local, const DTensorImpl& like) {
  return at::Tensor(c10::make_intrusive<DTensorImpl>(std::move(local), like));
}

// The local tensor in memory of its own size. A chunk may be a view of the whole tensor, which would stay alive with it.
at::Tensor in_own_memory(at::Tensor part);

// `tensor` in the layout `target`, on the same mesh or another, without a gradient. Shares no memory with `tensor`; may still be under way.
at::Tensor move_tensor(const at::Tensor& tensor, const LayoutPtr& target);

}  // namespace dtensor
