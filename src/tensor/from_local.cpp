// from_local without known global sizes: ranks exchange the shapes of their local tensors and check that they fit together.
#include <dtensor/base/error.hpp>
#include <dtensor/tensor/tensor.hpp>

#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>
#include <range/v3/numeric/iota.hpp>

#include <algorithm>

namespace dtensor {

namespace {

constexpr int64_t kMaxDims = 16, kMaxLength = int64_t{1} << 60;

// Every rank's (dtype, ndim, sizes...) in mesh order.
struct Shapes {
  std::vector<int64_t> words;
  c10::IntArrayRef of(int64_t i) const { return c10::IntArrayRef(words).slice(i * (kMaxDims + 2), kMaxDims + 2); }
  int64_t dtype(int64_t i) const { return of(i)[0]; }
  int64_t ndim(int64_t i) const { return of(i)[1]; }
  c10::IntArrayRef sizes(int64_t i) const { return of(i).slice(2, ndim(i)); }
};

Shapes exchange(const at::Tensor& local, const DeviceMesh& mesh) {
  std::vector<int64_t> mine(kMaxDims + 2, 0);
  mine[0] = static_cast<int64_t>(local.scalar_type());
  mine[1] = local.dim();
  std::ranges::copy(local.sizes(), mine.begin() + 2);
  if (mesh.size() == 1) return {mine};
  LocalMode local_mode;
  std::vector<int64_t> dims(mesh.ndim());
  ranges::iota(dims, 0);
  const std::vector<int64_t> counts(mesh.size(), kMaxDims + 2);
  const auto all = mesh.communicator(dims).all_gather(at::tensor(mine, at::kLong), counts).get();
  const auto* words = static_cast<const int64_t*>(all.data_ptr());
  Shapes shapes{std::vector<int64_t>(words, words + all.numel())};
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const bool fits = shapes.ndim(i) >= 0 && shapes.ndim(i) <= kMaxDims &&
                      std::ranges::all_of(shapes.sizes(i), [&](int64_t size) { return size >= 0 && size <= kMaxLength / mesh.size(); });
    require(fits, "from_local", "rank {} sent what is no shape: [{}]; hint: all ranks must run the same version of the library",
            mesh.ranks()[i], fmt::join(shapes.of(i), ", "));
  }
  return shapes;
}

// Global sizes: along each sharded dim, the sum of the local lengths over the mesh dimensions that shard it.
std::vector<int64_t> global_sizes(const Shapes& shapes, const DeviceMesh& mesh, PlacementsRef placements) {
  auto sizes = shapes.sizes(0).vec();
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    sizes[d] = 0;
    for (int64_t i = 0; i < mesh.size(); ++i) {
      const auto coordinate = mesh.coordinate_of(i);
      bool counts = true;
      for (int64_t m = 0; m < mesh.ndim(); ++m) counts &= coordinate[m] == 0 || placements[m].is_shard(d);
      if (counts) sizes[d] += shapes.sizes(i)[d];
    }
  }
  return sizes;
}

std::vector<int64_t> expected_sizes(const Layout& layout, c10::IntArrayRef coordinate) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    int64_t length = 0;
    for (const auto& interval : layout.intervals(d, coordinate)) length += interval.length();
    sizes.push_back(length);
  }
  return sizes;
}

}  // namespace

DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef given) {
  detail::check_plain("from_local", local, "the local shard");
  require(local.dim() <= kMaxDims, "from_local", "at most {} dims are supported; got {}", kMaxDims, local.dim());
  require(static_cast<int64_t>(given.size()) == mesh.ndim(), "from_local",
          "got {} placements for the {} dimensions of {}", given.size(), mesh.ndim(), mesh.str());
  require(mesh.contains_this_rank(), "from_local",
          "this rank is not in the mesh {}, whose ranks exchange shapes; hint: give the global sizes", mesh.str());
  const auto shapes = exchange(local, mesh);
  for (int64_t i = 1; i < mesh.size(); ++i) {
    require(shapes.dtype(i) == shapes.dtype(0) && shapes.ndim(i) == shapes.ndim(0), "from_local",
            "the local shards disagree: rank {} has {} with {} dims, rank {} has {} with {} dims", mesh.ranks()[0],
            c10::toString(static_cast<c10::ScalarType>(shapes.dtype(0))), shapes.ndim(0), mesh.ranks()[i],
            c10::toString(static_cast<c10::ScalarType>(shapes.dtype(i))), shapes.ndim(i));
  }
  Placements placements(given.begin(), given.end());
  for (auto& placement : placements) {
    if (placement.is_shard() && placement.dim < 0) placement.dim += static_cast<int16_t>(local.dim());
  }
  const auto sizes = global_sizes(shapes, mesh, placements);
  const auto layout = Layout::get(mesh, placements, sizes, local.scalar_type());
  std::vector<std::string> wrong;
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const auto expected = expected_sizes(*layout, mesh.coordinate_of(i));
    if (shapes.sizes(i) == c10::IntArrayRef(expected)) continue;
    wrong.push_back(fmt::format("rank {} has [{}] where [{}] is expected", mesh.ranks()[i],
                                fmt::join(shapes.sizes(i), ", "), fmt::join(expected, ", ")));
  }
  require(wrong.empty(), "from_local", "the local shards do not make up {}: {}; hint: shards are cut as torch.chunk cuts",
          layout->str(), fmt::join(wrong, "; "));
  return from_local(local, mesh, placements, sizes);
}

}  // namespace dtensor
