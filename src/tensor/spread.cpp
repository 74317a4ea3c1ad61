#include <dtensor/tensor/spread.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <c10/core/GradMode.h>
#include <range/v3/action/push_back.hpp>

#include <algorithm>
#include <map>
#include <set>

namespace dtensor::detail {

namespace {

using Dims = std::vector<int64_t>;

// Mesh dimensions of more than one rank on which the tensor is not Replicate.
Dims cut_dims(const DTensor& tensor) {
  Dims dims;
  for (int64_t m = 0; m < tensor.mesh().ndim(); ++m) {
    if (!tensor.placements()[m].is_replicate() && tensor.mesh().size(m) > 1) dims.push_back(m);
  }
  return dims;
}

Dims all_dims(const DeviceMesh& mesh) {
  Dims dims;
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if (mesh.size(m) > 1) dims.push_back(m);
  }
  return dims;
}

int64_t ranks_along(const DeviceMesh& mesh, const Dims& dims) {
  int64_t count = 1;
  for (const auto m : dims) count *= mesh.size(m);
  return count;
}

// The dimensions of `root` that contain exactly the ranks which differ from this one along `dims` of `mesh`. If there are no such, all.
Dims dims_in(const DeviceMesh& root, const DeviceMesh& mesh, const Dims& dims) {
  if (root == mesh || dims.empty()) return dims;
  std::set<int64_t> found;
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const auto coordinate = mesh.coordinate_of(i);
    bool along = true;
    for (int64_t m = 0; m < mesh.ndim(); ++m) {
      along &= coordinate[m] == mesh.coordinate(m) || std::ranges::find(dims, m) != dims.end();
    }
    if (!along) continue;
    const auto at = std::ranges::find(root.ranks(), mesh.ranks()[i]) - root.ranks().begin();
    const auto there = root.coordinate_of(at);
    for (int64_t m = 0; m < root.ndim(); ++m) {
      if (there[m] != root.coordinate(m)) found.insert(m);
    }
  }
  const Dims in_root(found.begin(), found.end());
  return ranks_along(root, in_root) == ranks_along(mesh, dims) ? in_root : all_dims(root);
}

bool holds(const DeviceMesh& root, const DeviceMesh& mesh) {
  if (root == mesh) return true;
  auto outer = root.ranks(), inner = mesh.ranks();
  std::ranges::sort(outer);
  std::ranges::sort(inner);
  return std::ranges::includes(outer, inner);
}

// The meshes whose ranks are not all in a larger mesh, the largest first, each with the indices of the tensors on it.
std::vector<std::pair<DeviceMesh, std::vector<size_t>>> roots_of(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<std::pair<DeviceMesh, std::vector<size_t>>> meshes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_dtensor(tensors[i])) continue;
    const auto mesh = DTensor(tensors[i]).mesh();
    const auto it = std::ranges::find_if(meshes, [&](const auto& m) { return m.first == mesh; });
    if (it == meshes.end()) meshes.push_back({mesh, {i}});
    else it->second.push_back(i);
  }
  std::ranges::stable_sort(meshes, [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
  decltype(meshes) roots;
  for (auto& [mesh, members] : meshes) {
    const auto& joining = mesh;
    const auto it = std::ranges::find_if(roots, [&](const auto& root) { return holds(root.first, joining); });
    if (it == roots.end()) roots.emplace_back(mesh, std::move(members));
    else ranges::push_back(it->second, members);
  }
  return roots;
}

Spread spread_in(const DeviceMesh& root, std::vector<size_t> members, c10::ArrayRef<at::Tensor> tensors, Among among) {
  std::map<std::pair<const void*, Dims>, Dims> known;
  std::set<int64_t> joint;
  std::vector<int64_t> parts;  // of each member
  for (const auto i : members) {
    const DTensor tensor(tensors[i]);
    const auto dims = cut_dims(tensor);
    const auto [it, is_new] = known.try_emplace({tensor.mesh().id(), dims});
    if (is_new) it->second = dims_in(root, tensor.mesh(), dims);
    joint.insert(it->second.begin(), it->second.end());
    parts.push_back(ranks_along(tensor.mesh(), dims));
  }
  const Dims dims = among == Among::all_ranks ? all_dims(root) : Dims(joint.begin(), joint.end());
  Spread spread{dims.empty() ? nullptr : &root.communicator(dims), std::move(members), {}};
  for (const auto count : parts) spread.weights.push_back(static_cast<double>(count) / static_cast<double>(ranks_along(root, dims)));
  return spread;
}

}  // namespace

std::vector<Spread> spread_of(c10::ArrayRef<at::Tensor> tensors, Among among) {
  std::vector<Spread> all;
  for (auto& [root, members] : roots_of(tensors)) all.push_back(spread_in(root, std::move(members), tensors, among));
  Spread plain;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (is_dtensor(tensors[i])) continue;
    plain.members.push_back(i);
    plain.weights.push_back(1);
  }
  if (!plain.members.empty()) all.push_back(std::move(plain));
  return all;
}

at::Tensor plain_local(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return is_dtensor(tensor) ? DTensor(tensor).to_local() : tensor.detach();
}

std::vector<at::Tensor> gradients_of(std::string_view tag, c10::ArrayRef<at::Tensor> parameters) {
  std::vector<at::Tensor> gradients;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    require(parameter.defined(), tag, "a parameter is undefined");
    if (!parameter.grad().defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (is_dtensor(parameter.grad()) && DTensor(parameter.grad()).layout().has_partial()) sync_gradients(parameter);
    const auto gradient = parameter.grad();
    require(gradient.layout() == at::kStrided, tag, "a gradient is sparse; hint: make the embedding with sparse(false)");
    if (!gradients.empty() && gradient.device() != gradients[0].device()) {
      fail(tag, "the gradients are on several devices; got {} and {}; hint: give those of each device for themselves",
           gradients[0].device().str(), gradient.device().str());
    }
    gradients.push_back(gradient);
  }
  return gradients;
}

}  // namespace dtensor::detail
