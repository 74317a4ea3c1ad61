// Factories of distributed tensors.
#include <dtensor/base/error.hpp>
#include <dtensor/tensor/on.hpp>
#include <dtensor/tensor/tensor.hpp>

#include "src/dispatch/absent.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <optional>

namespace dtensor {

namespace {

// Every mesh takes the meta device, for tensors without values.
at::TensorOptions on(const DeviceMesh& mesh, at::TensorOptions options) {
  if (options.has_device() && options.device().is_meta()) return options;
  require(!options.has_device() || options.device().type() == mesh.device_type(), "factory",
          "the options ask for device {}, but the mesh is {}", options.device().str(), mesh.str());
  return options.device(c10::Device(mesh.device_type()));
}

// A tensor of which each rank makes only its local tensor; `make` gets the local sizes.
template <class Make>
DTensor per_shard(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options,
                 Make&& make) {
  for (const auto& placement : placements) {
    require(!placement.is_partial(), "factory", "a factory cannot make a Partial tensor; got {}", str(placements));
  }
  const auto layout = Layout::get(mesh, placements, sizes, c10::typeMetaToScalarType(options.dtype()));
  at::Tensor result;
  {
    LocalMode local_mode;
    result = layout->is_absent() ? dispatch::absent(layout) : wrap(make(layout->local_sizes()), layout);
    as_dtensor(result)->laid_out = true;
  }
  result.set_requires_grad(options.requires_grad());
  return DTensor(result);
}

// A tensor of which each rank draws only its own elements.
template <class Draw>
DTensor drawn(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options, Draw&& draw) {
  const auto result = empty(sizes, mesh, placements, options.requires_grad(false)).tensor();
  std::optional<detail::OnMesh> elsewhere;
  if (!mesh.contains_this_rank()) elsewhere.emplace(mesh);
  draw(result);
  result.set_requires_grad(options.requires_grad());
  return DTensor(result);
}

// A tensor whose values depend on all elements: made replicated, as in Spmd, and then redistributed.
template <class Make>
DTensor whole(const DeviceMesh& mesh, PlacementsRef placements, bool requires_grad, Make&& make) {
  detail::OnMesh on_mesh(mesh);
  at::Tensor result = DTensor(make()).redistribute(placements);
  as_dtensor(result)->laid_out = true;
  return DTensor(result.set_requires_grad(requires_grad));
}

}  // namespace

DTensor empty(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  const auto o = on(mesh, options);
  return per_shard(sizes, mesh, placements, o, [&](c10::IntArrayRef local) { return at::empty(local, o.requires_grad(false)); });
}

DTensor full(c10::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, PlacementsRef placements,
             at::TensorOptions options) {
  const auto o = on(mesh, options);
  return per_shard(sizes, mesh, placements, o,
                  [&](c10::IntArrayRef local) { return at::full(local, value, o.requires_grad(false).dtype(o.dtype())); });
}

DTensor zeros(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return full(sizes, 0, mesh, placements, options);
}

DTensor ones(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return full(sizes, 1, mesh, placements, options);
}

DTensor rand(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return drawn(sizes, mesh, placements, options, [](const at::Tensor& tensor) { tensor.uniform_(); });
}

DTensor randn(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return drawn(sizes, mesh, placements, options, [](const at::Tensor& tensor) { tensor.normal_(); });
}

DTensor randint(int64_t low, int64_t high, c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements,
                at::TensorOptions options) {
  const auto o = options.has_dtype() ? options : options.dtype(at::kLong);
  return drawn(sizes, mesh, placements, o, [&](const at::Tensor& tensor) { tensor.random_(low, high); });
}

DTensor arange(const at::Scalar& end, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  const auto o = on(mesh, options).requires_grad(false);
  return whole(mesh, placements, options.requires_grad(), [&] { return at::arange(end, o); });
}

}  // namespace dtensor
