// Windows over a sharded dim. A rank fetches from other ranks the inputs that its outputs read (the halo), and sends their gradients back.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <c10/core/Scalar.h>

namespace dtensor::rules {

// An interval per rank of a group, in the group's order.
using Shares = std::vector<Interval>;

// The interval of `dim` that this rank needs, [.., needed[rank].length(), ..]. The intervals `held` by the ranks must be disjoint and
// ascending, and cover what is needed. Communicates one all_to_all of exact sizes, or nothing if all ranks hold what they need.
at::Tensor fetch_interval(const at::Tensor& local, int64_t dim, const Shares& held, const Shares& needed,
                          comm::Communicator& group);

// The adjoint: every rank has values for the interval that it needed. It gets the sum, in rank order, of all ranks' values for the
// interval that it holds. Communicates as fetch_interval does.
at::Tensor return_interval(const at::Tensor& local, int64_t dim, const Shares& held, const Shares& needed,
                           comm::Communicator& group);

// Output o of a dim reads the inputs o * stride - padding + dilation * [0, kernel).
struct Window {
  int64_t kernel = 1, stride = 1, padding = 0, dilation = 1;

  // The inputs that `outputs` read. With padding it reaches past the input. Empty for no outputs.
  Interval reads(const Interval& outputs) const;
};

// A dim whose inputs and outputs are sharded by the same mesh dimensions, as torch.chunk does.
class Halo {
 public:
  Halo(const LayoutPtr& input, const LayoutPtr& output, int64_t dim, const Window& window);

  int64_t dim() const { return dim_; }
  const Interval& read() const { return read_; }  // the inputs that this rank's outputs read

  // This rank's inputs -> all that its outputs read, [.., read().length(), ..], with `beyond` outside of the input.
  at::Tensor fetch(const at::Tensor& input, const at::Scalar& beyond) const;
  // The adjoint: values for all that this rank's outputs read -> their sums for its inputs.
  at::Tensor give_back(const at::Tensor& read) const;

 private:
  DeviceMesh mesh_;
  int64_t dim_;
  std::vector<int64_t> mesh_dims_;
  Shares held_, needed_;  // of the ranks that differ along mesh_dims_
  Interval read_, own_;   // own_: the part of read_ that is inside of the input
};

// The halos of all sharded dims from `first` on, which have a window each. Dims are fetched one after the other, which includes corners.
class Halos {
 public:
  Halos(const LayoutPtr& input, const LayoutPtr& output, int64_t first, const std::vector<Window>& windows);

  bool empty() const { return halos_.empty(); }
  auto begin() const { return halos_.begin(); }
  auto end() const { return halos_.end(); }

  at::Tensor fetch(at::Tensor input, const at::Scalar& beyond) const;
  at::Tensor give_back(at::Tensor read) const;
  // The sizes of what fetch makes of an input of `sizes`.
  std::vector<int64_t> read_sizes(c10::IntArrayRef sizes) const;

 private:
  std::vector<Halo> halos_;
};

// The most bytes that a rank receives if mesh dimension `mesh_dim` shards `dim` of a tensor of `sizes`, and the `outputs` windows on it.
// `like` is an operand whose other dims are sharded as those of the tensor.
int64_t halo_bytes(const Call& call, int64_t mesh_dim, const Operand& like, c10::IntArrayRef sizes, int64_t outputs, int64_t dim,
                   const Window& window);

}  // namespace dtensor::rules
