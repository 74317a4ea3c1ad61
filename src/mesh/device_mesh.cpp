// Device meshes: checks, slicing, and the groups along their dimensions.
#include <dtensor/mesh/device_mesh.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>

#include "src/mesh/stand_in.hpp"
#include "src/mesh/world_state.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>
#include <range/v3/numeric/iota.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <functional>
#include <ostream>

namespace dtensor {

namespace {

using detail::MeshState;

constexpr const char* kTag = "DeviceMesh";

int64_t product(const std::vector<int64_t>& sizes) {
  return c10::multiply_integers(sizes);
}

std::string tuple(const std::vector<int64_t>& sizes) { return fmt::format("({})", fmt::join(sizes, ", ")); }

// The coordinates of the index-th element of a row-major array.
std::vector<int64_t> unravel(int64_t index, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> coordinate(sizes.size());
  for (size_t d = sizes.size(); d-- > 0;) {
    coordinate[d] = index % sizes[d];
    index /= sizes[d];
  }
  return coordinate;
}

void check_names(const std::vector<std::string>& names) {
  for (auto it = names.begin(); it != names.end(); ++it) {
    require(!it->empty(), kTag, "a dimension has an empty name; got names {}", names);
    require(std::find(names.begin(), it, *it) == it, kTag, "the dimension name \"{}\" is repeated; got names {}", *it,
            names);
  }
}

void check(const MeshState& mesh, int world_size) {
  require(!mesh.sizes.empty(), kTag, "a mesh needs at least one dimension; hint: a mesh of one rank has sizes (1)");
  for (int64_t size : mesh.sizes) {
    require(size >= 1, kTag, "got sizes {}; expected every size to be at least 1", tuple(mesh.sizes));
  }
  require(mesh.names.size() == mesh.sizes.size(), kTag,
          "got {} sizes {} but {} names {}; hint: init_device_mesh(device, {{2, 2}}, {{\"dp\", \"tp\"}}) names each size",
          mesh.sizes.size(), tuple(mesh.sizes), mesh.names.size(), mesh.names);
  check_names(mesh.names);
  require(product(mesh.sizes) == static_cast<int64_t>(mesh.ranks.size()), kTag, "sizes {} need {} ranks; got {}",
          tuple(mesh.sizes), product(mesh.sizes), mesh.ranks.size());
  std::vector<bool> seen(world_size);
  for (int rank : mesh.ranks) {
    require(rank >= 0 && rank < world_size, kTag, "rank {} is out of range; expected 0 to {}, the world has {} ranks",
            rank, world_size - 1, world_size);
    require(!seen[rank], kTag, "rank {} is repeated; expected each rank once", rank);
    seen[rank] = true;
  }
}

// The ranks reached from `fixed` (a coordinate) by moving along `dims`, row-major in the order of `dims`.
std::vector<int> ranks_along(const MeshState& mesh, std::vector<int64_t> fixed, c10::ArrayRef<int64_t> dims) {
  std::vector<int64_t> sizes;
  for (int64_t d : dims) sizes.push_back(mesh.sizes[d]);
  std::vector<int> ranks;
  for (int64_t i = 0, n = product(sizes); i < n; ++i) {
    const auto moved = unravel(i, sizes);
    for (const auto& [d, place] : ranges::views::zip(dims, moved)) fixed[d] = place;
    int64_t index = 0;
    for (const auto& [size, place] : ranges::views::zip(mesh.sizes, fixed)) index = index * size + place;
    ranks.push_back(mesh.ranks[index]);
  }
  return ranks;
}

// "[[0, 1], [2, 3]]", or only the count when there are many.
std::string ranks_text(const MeshState& mesh) {
  if (mesh.ranks.size() > 64)
    return fmt::format("{} ranks, {} to {}", mesh.ranks.size(), mesh.ranks.front(), mesh.ranks.back());
  std::function<std::string(size_t, size_t, size_t)> nested = [&](size_t d, size_t begin, size_t count) -> std::string {
    if (d == mesh.sizes.size()) return std::to_string(mesh.ranks[begin]);
    const size_t each = count / mesh.sizes[d];
    std::string text;
    for (int64_t i = 0; i < mesh.sizes[d]; ++i) text += (i ? ", " : "") + nested(d + 1, begin + i * each, each);
    return "[" + text + "]";
  };
  return "ranks=" + nested(0, 0, mesh.ranks.size());
}

}  // namespace

DeviceMesh::DeviceMesh(c10::DeviceType device, std::vector<int> ranks, std::vector<int64_t> sizes,
                       std::vector<std::string> names)
    : DeviceMesh(World::current(), device, std::move(ranks), std::move(sizes), std::move(names)) {}

DeviceMesh::DeviceMesh(World& world, c10::DeviceType device, std::vector<int> ranks, std::vector<int64_t> sizes,
                       std::vector<std::string> names) {
  MeshState mesh{device, std::move(ranks), std::move(sizes), std::move(names)};
  check(mesh, world.size());
  const auto here = std::ranges::find(mesh.ranks, world.rank());
  mesh.member = here != mesh.ranks.end();
  mesh.coordinate = unravel(mesh.member ? here - mesh.ranks.begin() : 0, mesh.sizes);
  state_ = world.state().intern(std::move(mesh));
}

c10::DeviceType DeviceMesh::device_type() const { return state_->device; }
int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(state_->sizes.size()); }
int64_t DeviceMesh::size() const { return static_cast<int64_t>(state_->ranks.size()); }
c10::ArrayRef<int64_t> DeviceMesh::sizes() const { return state_->sizes; }
const std::vector<std::string>& DeviceMesh::names() const { return state_->names; }
const std::vector<int>& DeviceMesh::ranks() const { return state_->ranks; }
bool DeviceMesh::contains_this_rank() const { return state_->member; }

int64_t DeviceMesh::size(int64_t dim) const {
  if (dim < 0 || dim >= ndim())
    fail(kTag, "mesh dimension {} is out of range; {} has {} dimensions", dim, str(), ndim());
  return state_->sizes[dim];
}

int64_t DeviceMesh::dim(std::string_view name) const {
  const auto it = std::ranges::find(names(), name);
  require(it != names().end(), kTag, "there is no dimension \"{}\"; the mesh has {}; hint: the names are those given to init_device_mesh",
          name, names());
  return it - names().begin();
}

World& DeviceMesh::world() const {
  if (!state_->world)
    fail(kTag, "the world of {} has ended; hint: use a mesh only inside the launch that made it", str());
  return *state_->world;
}

c10::ArrayRef<int64_t> DeviceMesh::coordinate() const {
  if (!state_->member && !detail::StandIn::active()) fail(kTag, "this rank is not in {}; hint: ask contains_this_rank() first", str());
  return state_->coordinate;
}

std::vector<int64_t> DeviceMesh::coordinate_of(int64_t index) const {
  if (index < 0 || index >= size()) fail(kTag, "index {} is out of range; {} has {} ranks", index, str(), size());
  return unravel(index, state_->sizes);
}

DeviceMesh DeviceMesh::operator[](std::string_view name) const { return (*this)[{name}]; }

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string_view> wanted) const {
  std::vector<int64_t> dims, sizes;
  std::vector<std::string> names;
  for (auto name : wanted) {
    dims.push_back(dim(name));
    sizes.push_back(size(dims.back()));
    names.emplace_back(name);
  }
  check_names(names);
  auto ranks = ranks_along(*state_, coordinate().vec(), dims);
  return DeviceMesh(world(), device_type(), std::move(ranks), std::move(sizes), std::move(names));
}

DeviceMesh DeviceMesh::slice(std::string_view name, int64_t index) const {
  const auto sliced = dim(name);
  require(index >= 0 && index < size(sliced), kTag, "there is no slice {} of dimension \"{}\" of {}; expected 0 to {}", index, name, str(),
          size(sliced) - 1);
  std::vector<int64_t> dims, sizes;
  std::vector<std::string> kept;
  for (int64_t d = 0; d < ndim(); ++d) {
    if (d == sliced && ndim() > 1) continue;
    dims.push_back(d);
    sizes.push_back(d == sliced ? 1 : size(d));
    kept.push_back(names()[d]);
  }
  std::vector<int64_t> corner(ndim());
  corner[sliced] = index;
  auto ranks = ndim() > 1 ? ranks_along(*state_, corner, dims) : std::vector<int>{state_->ranks[index]};
  return DeviceMesh(world(), device_type(), std::move(ranks), std::move(sizes), std::move(kept));
}

DeviceMesh DeviceMesh::flatten(std::initializer_list<std::string_view> joined, std::string name) const {
  require(joined.size() > 0, kTag, "flatten needs the name of at least one dimension; the mesh has {}", names());
  const int64_t first = dim(*joined.begin());
  int64_t next = first, count = 1;
  for (auto each : joined) {
    require(dim(each) == next, kTag,
            "flatten joins adjacent dimensions in the mesh's order; got {}, the mesh has {}; hint: slice the mesh by "
            "name first "
            "to reorder it",
            std::vector<std::string>(joined.begin(), joined.end()), names());
    count *= size(next++);
  }
  auto new_sizes = state_->sizes;
  auto new_names = names();
  new_sizes.erase(new_sizes.begin() + first + 1, new_sizes.begin() + next);
  new_names.erase(new_names.begin() + first + 1, new_names.begin() + next);
  new_sizes[first] = count;
  new_names[first] = std::move(name);
  return DeviceMesh(world(), device_type(), ranks(), std::move(new_sizes), std::move(new_names));
}

comm::Communicator& DeviceMesh::communicator(int64_t dim) const {
  size(dim);  // checks the range
  return communicator(c10::ArrayRef<int64_t>(&dim, 1));
}

comm::Communicator& DeviceMesh::communicator(c10::ArrayRef<int64_t> dims) const {
  const bool ascending = std::ranges::adjacent_find(dims, std::greater_equal<>()) == dims.end();
  if (dims.empty() || !ascending || dims.front() < 0 || dims.back() >= ndim()) {
    fail(kTag, "got mesh dimensions {}; expected ascending dimensions of {}", dims.vec(), str());
  }
  if (!state_->member) coordinate();  // throws where nothing is worked out
  auto& world_state = world().state();
  std::lock_guard<std::recursive_mutex> lock(world_state.mutex);
  auto& made = state_->communicators;
  if (const auto found = made.find(dims); found != made.end()) return *found->second;
  std::vector<std::string> group;
  for (int64_t d : dims) group.push_back(names()[d]);
  const auto name = fmt::format("{}", fmt::join(group, "+"));
  const auto ranks = ranks_along(*state_, coordinate().vec(), dims);
  auto connected = state_->member ? world_state.connect(name, ranks) : detail::without_peers(name, ranks, world().size());
  return *made.emplace(dims.vec(), std::move(connected)).first->second;
}

std::string DeviceMesh::str() const {
  std::string text = "DeviceMesh(" + c10::DeviceTypeName(device_type(), /*lower_case=*/true);
  for (const auto& [name, size] : ranges::views::zip(names(), state_->sizes)) text += fmt::format(", {}={}", name, size);
  return text + ", " + ranks_text(*state_) + ")";
}

DeviceMesh init_device_mesh(c10::DeviceType device, std::vector<int64_t> sizes, std::vector<std::string> names) {
  const int world_size = World::current().size();
  require(std::ranges::all_of(sizes, [](int64_t size) { return size > 0; }), kTag,
          "mesh {} has a dimension without ranks; expected sizes of at least 1, whose product is the world's {}", tuple(sizes), world_size);
  require(product(sizes) == world_size, kTag,
          "mesh {} has {} ranks but the world has {}; hint: start {} ranks (--ranks {}, or dtensor-run -n {}), or choose "
          "sizes whose product is {}",
          tuple(sizes), product(sizes), world_size, product(sizes), product(sizes), product(sizes), world_size);
  require(device != c10::kCUDA || c10::impl::hasDeviceGuardImpl(device), kTag,
          "a mesh on cuda needs a libtorch with CUDA; this one is for CPUs only; hint: init_device_mesh(torch::kCPU, ...), or link the "
          "libtorch that pytorch.org gives for CUDA");
  std::vector<int> ranks(world_size);
  ranges::iota(ranks, 0);
  if (names.empty()) {
    for (size_t d = 0; d < sizes.size(); ++d) names.push_back(fmt::format("dim{}", d));
  }
  return DeviceMesh(device, std::move(ranks), std::move(sizes), std::move(names));
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) { return out << mesh.str(); }

}  // namespace dtensor
