#include "src/gradients/drift.hpp"

#include "src/dispatch/compared.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/replicated.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/dispatch/local_mode.hpp>

#include <fmt/ranges.h>

namespace dtensor {

namespace {

constexpr int64_t kMostBytes = 256 << 10;  // that are worth a hash
constexpr const char* kTurnOff = "set_replication_check(false) or DTENSOR_CHECK_REPLICATED=0 turns this check off";

using Dims = c10::SmallVector<int64_t, 4>;

std::string name_of(const DTensorImpl& leaf) {
  const auto sizes = fmt::format("a parameter of sizes [{}]", fmt::join(leaf.layout()->sizes(), ", "));
  return leaf.module ? fmt::format("{} in '{}'", sizes, *leaf.module) : sizes;
}

// On this rank, or soon.
bool has_values(const DTensorImpl& tensor) { return tensor.values() == Values::ready || tensor.values() == Values::pending; }

void check_gradient(const DTensorImpl& leaf, const at::Tensor& gradient, const Dims& dims) {
  const auto differing = dispatch::ranks_that_differ(gradient, leaf.layout()->mesh(), dims);
  require(differing.empty(), "backward",
          "the gradient of {} is replicated, but its values on ranks {} differ from the first rank's: each rank trains on data of its own, "
          "and the models drift apart; hint: give every rank the same batch, and shard it (dt::batches or dt::distribute_tensor; no "
          "DistributedSampler), or say with from_local that each rank has its own; {}",
          name_of(leaf), differing, kTurnOff);
}

void check_values(DTensorImpl& leaf, const Dims& dims) {
  const auto differing = dispatch::ranks_that_differ(leaf.local(), leaf.layout()->mesh(), dims);
  require(differing.empty(), "backward",
          "{} is replicated, but its values on ranks {} differ from the first rank's: the ranks have updated it differently; hint: use one "
          "learning rate and the same numbers on every rank, and write parameters on all ranks alike; {}",
          name_of(leaf), differing, kTurnOff);
}

}  // namespace

void check_drift(const at::Tensor& leaf, const at::Tensor& gradient) {
  auto &of_leaf = *as_dtensor(leaf), &of_gradient = *as_dtensor(gradient);
  const auto &there = of_leaf.layout(), &here = of_gradient.layout();
  const auto& mesh = there->mesh();
  if (mesh.size() == 1 || !dispatch::checks_replicated || !has_values(of_leaf) || !has_values(of_gradient) || here->mesh() != mesh) return;
  Dims alike, summed;
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    if (mesh.size(d) == 1 || !there->placements()[d].is_replicate()) continue;
    if (here->placements()[d].is_replicate()) alike.push_back(d);
    if (here->placements()[d].is_partial()) summed.push_back(d);
  }
  const auto bytes = leaf.numel() * static_cast<int64_t>(leaf.element_size());
  if ((alike.empty() && summed.empty()) || bytes > kMostBytes || leaf.is_meta()) return;
  if (!dispatch::Compared::is_due(dispatch::compared(mesh).gradients++)) return;
  if (!alike.empty() && mesh.device_type() == c10::kCPU) check_gradient(of_leaf, of_gradient.local(), alike);
  if (!summed.empty()) check_values(of_leaf, summed);
}

}  // namespace dtensor
