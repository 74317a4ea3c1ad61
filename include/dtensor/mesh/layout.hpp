// The layout of a global tensor on a mesh: which elements each rank holds. Layouts are interned: equal ones are one object.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#pragma GCC visibility push(default)

namespace dtensor {

using Sizes = c10::SmallVector<int64_t, 5>;

class Layout;
struct LayoutTable;
using LayoutPtr = c10::intrusive_ptr<Layout>;

class Layout : public c10::intrusive_ptr_target {
 public:
  // The layout of a tensor of global `sizes` and `strides`. Negative shard dims count from the end; a `unit` without
  // effect is normalized to 1. Throws when a placement does not fit (count, dim range, split).
  static LayoutPtr get(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                       c10::ScalarType dtype);
  // Row-major strides.
  static LayoutPtr get(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::ScalarType dtype);

  const DeviceMesh& mesh() const { return mesh_; }
  PlacementsRef placements() const { return placements_; }
  c10::IntArrayRef sizes() const { return sizes_; }
  c10::IntArrayRef strides() const { return strides_; }
  c10::ScalarType dtype() const { return dtype_; }
  int64_t ndim() const { return static_cast<int64_t>(sizes_.size()); }

  bool is_replicated() const { return replicated_; }
  bool has_partial() const { return partial_; }

  // The mesh dimension along which the tensor is flat, or -1.
  int64_t flat_dim() const { return flat_dim_; }
  bool is_flat() const { return flat_dim_ >= 0; }
  // The elements that the rank at `coordinate` holds: an interval, in memory order, of what the other placements leave. Flat layouts only.
  Interval flat_shard(c10::IntArrayRef coordinate) const;

  // Whether the tensor has no values yet (dt::DeferredInit). A deferred layout and its `present()` are equal in all else, and two objects.
  bool is_deferred() const { return deferred_; }
  LayoutPtr deferred() const;
  LayoutPtr present() const;

  // Of a tensor elsewhere: the calling rank is not in the mesh, so it has no part.
  bool is_absent() const { return absent_; }

  // The calling rank's local sizes; of an absent tensor those of the mesh's first rank.
  c10::IntArrayRef local_sizes() const { return local_sizes_; }

  // The same tensor under other placements; deferred if this one is. If it becomes flat and its strides leave gaps, the result is
  // row-major.
  LayoutPtr with(PlacementsRef placements) const;
  // The same on another mesh.
  LayoutPtr with(const DeviceMesh& mesh, PlacementsRef placements) const;

  // The intervals of tensor dim `dim` that the rank at `coordinate` holds. The rank's region is their product over all dims; under a
  // flat layout it holds flat_shard() of that region.
  Intervals intervals(int64_t dim, c10::IntArrayRef coordinate) const;

  // The global elements that the rank at `coordinate` holds, as boxes (one interval per dim), in row-major order.
  std::vector<std::vector<Interval>> boxes(c10::IntArrayRef coordinate) const;

  // The same as contiguous runs of the row-major global index, ascending, maximal.
  std::vector<Interval> runs(c10::IntArrayRef coordinate) const;

  // The local sizes under the mesh dimensions before `mesh_dim` only, without a flat placement.
  Sizes local_sizes_before(int64_t mesh_dim, c10::IntArrayRef coordinate) const;

  // "f32[8, 16] (S(0), R) on (dp=2, tp=2)"
  std::string str() const;

  ~Layout() override = default;
  void release_resources() override;  // removes the layout from the table

  // Use get(), which checks and interns.
  Layout(DeviceMesh mesh, Placements placements, Sizes sizes, Sizes strides, c10::ScalarType dtype, bool deferred);

 private:
  static LayoutPtr get(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                       c10::ScalarType dtype, bool deferred);

  void add_products(const std::vector<Interval>& positions, c10::IntArrayRef coordinate, std::vector<std::vector<Interval>>& boxes) const;

  friend struct LayoutTable;
  DeviceMesh mesh_;
  Placements placements_;
  Sizes sizes_, strides_, local_sizes_;
  c10::ScalarType dtype_;
  bool replicated_ = false, partial_ = false, deferred_, absent_;
  int64_t flat_dim_ = -1;
  size_t hash_ = 0;
  std::shared_ptr<LayoutTable> table_;
};

// The elements [elements.begin, elements.end) of a row-major tensor of `sizes`, in order, as boxes.
std::vector<std::vector<Interval>> boxes_of(c10::IntArrayRef sizes, Interval elements);

// Row-major strides of a shape.
Sizes contiguous_strides(c10::IntArrayRef sizes);

// The dims in the order of memory: the last varies fastest.
Sizes memory_order(c10::IntArrayRef strides);

}  // namespace dtensor

#pragma GCC visibility pop
