// An n-dimensional array of ranks with named dimensions.
#pragma once

#include <dtensor/comm/communicator.hpp>

#include <c10/core/DeviceType.h>

#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

class World;
namespace detail {
struct MeshState;
}

// A cheap handle. Meshes are interned per rank: equal ones (device, ranks, sizes, names) are the same object.
class DeviceMesh {
 public:
  // `ranks` are world ranks in row-major order of `sizes`. Throws on a repeated or out-of-range rank, a repeated or
  // empty name, or counts that disagree. A rank that is not in `ranks` may hold the mesh but not communicate on it.
  DeviceMesh(c10::DeviceType device, std::vector<int> ranks, std::vector<int64_t> sizes,
             std::vector<std::string> names);

  c10::DeviceType device_type() const;
  int64_t ndim() const;
  int64_t size() const;             // number of ranks
  int64_t size(int64_t dim) const;  // ranks along one dimension
  c10::ArrayRef<int64_t> sizes() const;
  const std::vector<std::string>& names() const;
  const std::vector<int>& ranks() const;

  // The index of a named dimension. Throws, listing the names there are.
  int64_t dim(std::string_view name) const;

  // Whether the calling rank is in the mesh, and its coordinate there. If it is not, asking for the coordinate throws, except inside
  // dt::on.
  bool contains_this_rank() const;
  c10::ArrayRef<int64_t> coordinate() const;
  int64_t coordinate(int64_t dim) const { return coordinate()[dim]; }
  // The coordinate of the i-th rank of `ranks()`.
  std::vector<int64_t> coordinate_of(int64_t index) const;

  // The submesh through the calling rank along the named dimensions, in the given order.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](std::initializer_list<std::string_view> names) const;

  // The submesh at `index` along the named dimension, without that dimension: one stage of a pipeline. Every rank gets it, also one that is
  // not in it. Of a mesh of one dimension: a mesh of one rank, whose dimension keeps its name. Throws for an index out of range.
  DeviceMesh slice(std::string_view name, int64_t index) const;

  // This mesh with the named, adjacent dimensions joined into one called `name`.
  DeviceMesh flatten(std::initializer_list<std::string_view> names, std::string name) const;

  // The group of ranks whose coordinates differ from this one's only along `dim` (or along `dims`, ascending). Made on first
  // use, by all its members at once. A group of one communicates nothing.
  comm::Communicator& communicator(int64_t dim) const;
  comm::Communicator& communicator(c10::ArrayRef<int64_t> dims) const;

  bool operator==(const DeviceMesh& other) const { return state_ == other.state_; }
  const void* id() const { return state_.get(); }

  // The world that the mesh was made in, even when a thread of another world calls it (autograd's). Throws when that world has
  // ended.
  World& world() const;

  // "DeviceMesh(cpu, dp=2, tp=2, ranks=[[0, 1], [2, 3]])"
  std::string str() const;

 private:
  friend class Layout;
  DeviceMesh(World& world, c10::DeviceType device, std::vector<int> ranks, std::vector<int64_t> sizes,
             std::vector<std::string> names);

  std::shared_ptr<detail::MeshState> state_;
};

// A mesh over all ranks of the world, in order. Throws when the product of `sizes` is not the world's size. Names
// default to "dim0", "dim1", ...
DeviceMesh init_device_mesh(c10::DeviceType device, std::vector<int64_t> sizes, std::vector<std::string> names = {});

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

}  // namespace dtensor

#pragma GCC visibility pop
