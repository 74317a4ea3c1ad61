// Whether placements fit a tensor, decided alike by every rank, and their normal form.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

namespace dtensor::detail {

struct Misfit {
  enum Kind { none, dim_range, factors, length, shares, second_flat, no_dims, short_buffer } kind = none;
  int64_t mesh_dim = 0;
  int64_t got = 0;  // length: the length that split*unit does not divide; short_buffer: the elements that it should hold
};

// Turns negative dims into positive ones and drops units and shares without effect. Returns the first placement that cannot be
// applied.
Misfit normalize(c10::ArrayRef<int64_t> mesh_sizes, Placements& placements, c10::IntArrayRef sizes);

// The same; throws an error that names the placement, the mesh dimension and the shape.
void check_and_normalize(const DeviceMesh& mesh, Placements& placements, c10::IntArrayRef sizes);

}  // namespace dtensor::detail
