// DTensor: an at::Tensor that is distributed over a mesh, and the functions that make one and look inside.
#pragma once

#include <dtensor/dispatch/explicit.hpp>
#include <dtensor/mesh/layout.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <iosfwd>
#include <string_view>

namespace dtensor {

// Whether a tensor is distributed.
bool is_dtensor(const at::Tensor& tensor);

// How it lies; null for a plain tensor.
const Layout* find_layout(const at::Tensor& tensor);

// A handle to an at::Tensor known to be distributed. It is the same tensor: all of libtorch takes it.
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

  // This rank's part, a plain tensor that shares memory with the DTensor. Waits for a pending move. Differentiable: the
  // gradient is taken to lie as this tensor does (Partial as Replicate, since each rank sees the whole gradient).
  at::Tensor to_local() const;
  // The same with the placements in which the ranks' gradients make up the whole one. Partial: they add up, where each rank goes
  // on with different work on the same values.
  at::Tensor to_local(PlacementsRef gradient) const;

  // The whole tensor, plain, on every rank: redistribute(replicate) and to_local. Differentiable.
  at::Tensor full_tensor() const;

  // The same values under other placements. Communicates as planned by plan_move; differentiable; asynchronous: the result is
  // waited for when it is read.
  DTensor redistribute(PlacementsRef placements) const;
  DTensor redistribute(std::initializer_list<Placement> placements) const;

 private:
  at::Tensor tensor_;
};

// Values with the layout on top. Gathers.
std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

// Lays out a plain tensor that every rank holds whole: each keeps its part. Communicates nothing; the ranks' tensors must be
// equal (inside Spmd with checks on, a hash is compared). A DTensor on the same mesh is redistributed. Differentiable.
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, PlacementsRef placements);
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, std::initializer_list<Placement> placements);

// Makes a DTensor of the ranks' local parts. The global sizes are found by exchanging shapes (one small all_gather); throws on
// every rank, naming ranks, when shapes or dtypes do not fit together. Differentiable.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements);
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, std::initializer_list<Placement> placements);
// The same without an exchange, when the global sizes are known. Throws if `local` does not have the sizes they imply.
DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes);

// `tensor` under other placements; a plain tensor is returned as it is, so a model can mark layouts and still run alone.
at::Tensor redistribute(const at::Tensor& tensor, PlacementsRef placements);

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

// Re-lays a DTensor in place: every handle to it sees the new placements. For parameters; throws on a tensor that takes part
// in a graph (not a leaf). Communicates as planned.
void redistribute_(const at::Tensor& tensor, PlacementsRef placements);

// Pins a tensor, its views and what detach gives to the mesh dimensions that cut it: where another way is legal, no operator moves it
// along them, also where that would cost less. parallelize_module pins what its plan cuts, so that activations move and weights do not.
void pin(const at::Tensor& tensor, bool pinned = true);
bool is_pinned(const at::Tensor& tensor);

// Says whose parameter a tensor is ("layers.3.mlp"): what operators communicate that read it, or a view of it, is counted and traced as that
// module's. parallelize_module and fully_shard name all parameters and buffers. Nothing is communicated. Throws for a plain tensor.
void name_module(const at::Tensor& parameter, std::string_view module);
std::string_view module_name(const at::Tensor& tensor);  // empty: nobody said

// While it lives, gradients of leaves accumulate without communication (they may be left Partial); the next backward outside
// of it reduces them once. It holds for the rank, in whichever thread.
class NoSync {
 public:
  NoSync();
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
};
inline NoSync no_sync() { return NoSync(); }

// Reduces gradients that no_sync left Partial into their parameters' layouts.
void sync_gradients(c10::ArrayRef<at::Tensor> parameters);

}  // namespace dtensor
