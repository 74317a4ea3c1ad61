// Flat tensors that are gathered and reduced together: what fully_shard's units are made of.
#pragma once

#include <dtensor/comm/work.hpp>
#include <dtensor/mesh/layout.hpp>
#include <dtensor/redistribute/elements.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Optional.h>
#include <c10/util/intrusive_ptr.h>

namespace dtensor {

// Members are flat tensors (leaves, as a rule) by their number. A group has the say where an operator needs a member whole and where the
// gradient of one arrives; views, casts and detached copies of a member are the same member.
class FlatGroup : public c10::intrusive_ptr_target {
 public:
  // The elements of what the mesh dimension cuts, one-dimensional, in memory order, as `dtype`; or an undefined tensor: the member is then
  // gathered by itself. `generation`: of a copy, when it was made; -1 for the member's own memory.
  virtual at::Tensor gather(int64_t index, at::ScalarType dtype, int64_t generation) = 0;

  // Takes a gradient that a backward brings for a leaf; returns what is to be accumulated in its grad(), which is taken out when it is
  // accumulated already. `defer`: inside NoSync.
  virtual at::Tensor reduce(int64_t index, const at::Tensor& leaf, const at::Tensor& gradient, bool defer) = 0;

  // A member has got other values, or other memory.
  virtual void written(int64_t index) = 0;
  // Counts such changes.
  virtual int64_t generation() const = 0;

  // The device that members are said to be on and gathered to, where their parts are kept on another.
  virtual c10::optional<c10::Device> device() const { return {}; }

  // Lets the members go, whole along the mesh dimension, and takes them back as they are then laid out on others.
  virtual void dissolve() = 0;
  virtual void restore() = 0;
};

// Makes a flat tensor member `index` of a group, or of none.
void join_group(const at::Tensor& tensor, c10::intrusive_ptr<FlatGroup> group, int64_t index);
FlatGroup* group_of(const at::Tensor& tensor);

// -- For groups ------------------------------------------------------------------------------------------------------------

// A DTensor of a local part of the layout's local sizes, which `work` may still be filling. No operator runs, and no gradient follows.
at::Tensor make_part(at::Tensor local, LayoutPtr layout, comm::WorkPtr work = {});
// The local part, finished; and as it is, which may still be under way.
const at::Tensor& part_of(const at::Tensor& tensor);
const at::Tensor& part_under_way(const at::Tensor& tensor);
const LayoutPtr& layout_of(const at::Tensor& tensor);
// Gives the part other memory, of the same values. Members' groups are not told.
void move_part(const at::Tensor& tensor, at::Tensor local);

}  // namespace dtensor
