// Groups of flat tensors that are gathered and reduced together. The units of fully_shard are such groups.
#pragma once

#include <dtensor/comm/work.hpp>
#include <dtensor/mesh/layout.hpp>
#include <dtensor/redistribute/elements.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Optional.h>
#include <c10/util/intrusive_ptr.h>

#pragma GCC visibility push(default)

namespace dtensor {

// Members are flat tensors, usually leaves, known by their index. The group is called when an operator needs a member whole, and when the
// gradient of a member arrives. Views, casts and detached copies of a member count as the same member.
class FlatGroup : public c10::intrusive_ptr_target {
 public:
  // Returns the member whole along the flat mesh dimension: its elements in memory order, one-dimensional, as `dtype`. If the result is
  // undefined, the member is gathered by itself. `generation` is that of a copy when it was made; -1 for the member's own memory.
  virtual at::Tensor gather(int64_t index, at::ScalarType dtype, int64_t generation) = 0;

  // Takes a gradient that a backward pass brings for a leaf. Returns what is to be accumulated in its grad(). If the result includes the
  // old grad() already, removes that from the leaf. `defer`: inside NoSync.
  virtual at::Tensor reduce(int64_t index, const at::Tensor& leaf, const at::Tensor& gradient, bool defer) = 0;

  // Called when a member gets other values, or other memory.
  virtual void written(int64_t index) = 0;
  // The number of such changes so far.
  virtual int64_t generation() const = 0;

  // If shards are kept on another device (offloading): the device that members report, and are gathered to.
  virtual c10::optional<c10::Device> device() const { return {}; }

  // dissolve() releases the members, whole along the flat mesh dimension. restore() takes them back, in the layouts that they then have on
  // other mesh dimensions.
  virtual void dissolve() = 0;
  virtual void restore() = 0;

  // Whether gradients came inside NoSync, and are not reduced yet.
  virtual bool has_deferred() const { return false; }
};

// Makes a flat tensor member `index` of a group; with a null group, of none.
void join_group(const at::Tensor& tensor, c10::intrusive_ptr<FlatGroup> group, int64_t index);
FlatGroup* group_of(const at::Tensor& tensor);

// -- For groups ------------------------------------------------------------------------------------------------------------

// Makes a DTensor of a local tensor, which has the layout's local sizes and which `work` may still be filling. Runs no operator; the result
// has no gradient.
at::Tensor wrap_local(at::Tensor local, LayoutPtr layout, comm::WorkPtr work = {});
// The local tensor: local_shard() waits until it is finished, local_shard_under_way() does not.
const at::Tensor& local_shard(const at::Tensor& tensor);
const at::Tensor& local_shard_under_way(const at::Tensor& tensor);
const LayoutPtr& layout_of(const at::Tensor& tensor);
// Replaces the local tensor by one with the same values in other memory. Does not call the group.
void replace_local_shard(const at::Tensor& tensor, at::Tensor local);

}  // namespace dtensor

#pragma GCC visibility pop
