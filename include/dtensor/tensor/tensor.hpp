// DTensor: an at::Tensor that is distributed over a mesh, and the functions that make one and look inside.
#pragma once

#include <dtensor/dispatch/explicit.hpp>
#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <iosfwd>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor {

// Whether a tensor is distributed.
bool is_dtensor(const at::Tensor& tensor);

// The layout of a tensor; null for a plain one.
const Layout* find_layout(const at::Tensor& tensor);

namespace detail {
// Throws unless `tensor` is plain: defined, not distributed, dense, not quantized. `what` is said of it: "an input", "the local tensor".
void check_plain(std::string_view tag, const at::Tensor& tensor, std::string_view what);
}  // namespace detail

// A handle to an at::Tensor known to be distributed. It is the same tensor, and converts to it where a parameter is an at::Tensor. Write
// tensor() where libtorch takes arguments of any type (Sequential::forward, AnyModule), and for operators (x.tensor() + 1).
class DTensor {
 public:
  // Throws when `tensor` is not distributed.
  explicit DTensor(at::Tensor tensor);

  operator const at::Tensor&() const { return tensor_; }
  const at::Tensor& tensor() const { return tensor_; }
  const at::Tensor* operator->() const { return &tensor_; }

  const Layout& layout() const;
  const DeviceMesh& mesh() const { return layout().mesh(); }
  PlacementsRef placements() const { return layout().placements(); }
  c10::IntArrayRef sizes() const { return layout().sizes(); }

  // Whether this rank is not in its mesh, and knows only its sizes, dtype and layout (docs/moves.md).
  bool is_absent() const { return layout().is_absent(); }

  // The local tensor, plain; it shares memory with the DTensor. Waits for a move under way. Differentiable: the gradient gets the
  // placements of this tensor, with Replicate in place of Partial, since each rank sees the whole gradient.
  at::Tensor to_local() const;
  // The same with given placements of the gradient. Partial: the ranks' gradients add up, because each rank goes on with different
  // work on the same values.
  at::Tensor to_local(PlacementsRef gradient) const;

  // The whole tensor, plain, on every rank: redistribute(replicate) and to_local. Differentiable.
  at::Tensor full_tensor() const;

  // The same values under other placements. Communicates as planned by plan_move; differentiable; asynchronous: the result is
  // waited for when it is read.
  DTensor redistribute(PlacementsRef placements) const;
  DTensor redistribute(std::initializer_list<Placement> placements) const;

  // The same values on another mesh of this world, whose ranks may be the same, overlap or be others. Every rank of both meshes calls it
  // (others may): each receives what it lacks, once, in one all_to_all of them; the result is absent on ranks that are not in `mesh`, as
  // this tensor may be on ranks that are not in its own. A Partial tensor is reduced on its own mesh first. Differentiable: the gradient
  // moves back. Asynchronous. Throws for meshes of two worlds or kinds of device, and for placements that do not fit.
  DTensor redistribute(const DeviceMesh& mesh, PlacementsRef placements) const;
  DTensor redistribute(const DeviceMesh& mesh, std::initializer_list<Placement> placements) const;

 private:
  at::Tensor tensor_;
};

// Values with the layout on top. Gathers.
std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

// Shards a plain tensor that every rank holds whole: each rank keeps its shard. The ranks' tensors must be equal. Communicates
// nothing, but inside Spmd with checks on, ranks compare a hash of some. A DTensor on the same mesh is redistributed. Differentiable.
// On a rank that is not in the mesh the result is absent.
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, PlacementsRef placements);
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, std::initializer_list<Placement> placements);

// Makes a DTensor of the ranks' local tensors. Ranks exchange shapes to find the global sizes (one small all_gather). Throws on
// every rank, naming ranks, when shapes or dtypes do not fit together. Differentiable.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements);
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, std::initializer_list<Placement> placements);
// The same without an exchange, when the global sizes are known. Throws if `local` does not have the sizes they imply. On a rank that is
// not in the mesh the result is absent, and of `local` only the dtype counts.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes);

// `tensor` under other placements. A plain tensor is returned as it is, so a model can mark layouts and still run on one device.
at::Tensor redistribute(const at::Tensor& tensor, PlacementsRef placements);

// `tensor` on another mesh, see DTensor::redistribute. A plain tensor is returned as it is.
at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, PlacementsRef placements);
at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, std::initializer_list<Placement> placements);

// The whole tensor; a plain tensor is returned as it is.
at::Tensor full_tensor(const at::Tensor& tensor);

// Factories. Values are those of one device.
DTensor zeros(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options = {});
DTensor ones(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options = {});
DTensor empty(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options = {});
DTensor full(c10::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, PlacementsRef placements,
             at::TensorOptions options = {});
DTensor rand(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options = {});
DTensor randn(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options = {});
DTensor randint(int64_t low, int64_t high, c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements,
                at::TensorOptions options = {});
DTensor arange(const at::Scalar& end, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options = {});

// Redistributes a DTensor in place: every handle to it sees the new placements. For parameters. Throws for the result of an
// operator (not a leaf). Communicates as planned.
void redistribute_(const at::Tensor& tensor, PlacementsRef placements);

// Pins a tensor, its views and its detached forms to the mesh dimensions that shard it: an operator moves it along them only where
// there is no other legal way, even if moving it would cost less. parallelize_module pins the parameters that its plan shards, so that
// activations move and weights do not.
void pin(const at::Tensor& tensor, bool pinned = true);
bool is_pinned(const at::Tensor& tensor);

// Says whose parameter a tensor is ("layers.3.mlp"). What operators communicate that read it, or a view of it, is counted and traced as
// that module's. parallelize_module and fully_shard name all parameters and buffers. Communicates nothing. Throws for a plain tensor.
void name_module(const at::Tensor& parameter, std::string_view module);
std::string_view module_name(const at::Tensor& tensor);  // empty: it has no name

// While it lives, gradients of leaves accumulate without communication and may stay Partial. The next backward outside of it
// reduces them once. It applies to all threads of the rank.
class NoSync {
 public:
  NoSync();
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
};
inline NoSync no_sync() { return NoSync(); }

// Reduces gradients that no_sync left Partial to the layouts of their parameters.
void sync_gradients(c10::ArrayRef<at::Tensor> parameters);

}  // namespace dtensor

#pragma GCC visibility pop
