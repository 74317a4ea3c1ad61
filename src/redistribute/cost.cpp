// The cost of a step: latency + bytes/bandwidth of the usual algorithms, plus local copies. And the tables of latencies and bandwidths.
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>

#include "src/redistribute/plan_cache.hpp"
#include "src/redistribute/transition.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>

namespace dtensor {

namespace {

using detail::PlanCache;

void check_cost(std::string_view mesh_dim, const CommCost& cost) {
  require(cost.latency >= 0 && cost.bandwidth > 0 && cost.copy_bandwidth > 0, "set_comm_cost",
          "got latency {}, bandwidth {}, copy_bandwidth {} for \"{}\"; expected positive numbers (latency may be 0)",
          cost.latency, cost.bandwidth, cost.copy_bandwidth, mesh_dim);
}

CommCost cost_from(const nlohmann::json& entry, CommCost cost, const std::string& path) {
  for (const auto& [key, value] : entry.items()) {
    double* field = key == "latency"          ? &cost.latency
                    : key == "bandwidth"      ? &cost.bandwidth
                    : key == "copy_bandwidth" ? &cost.copy_bandwidth
                                              : nullptr;
    require(field && value.is_number(), "set_comm_cost",
            "{} has \"{}\": {}; expected numbers latency, bandwidth, copy_bandwidth", path, key, value.dump());
    *field = value.get<double>();
  }
  return cost;
}

void load_file(const std::string& path, PlanCache& cache) {
  std::ifstream file(path);
  require(file.is_open(), "set_comm_cost", "cannot read {}; hint: DTENSOR_COST_FILE names it", path);
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  require(json.is_object(), "set_comm_cost", "{} is not a JSON object; hint: DTENSOR_COST_FILE names it", path);
  const auto fallback = json.contains("default") ? cost_from(json["default"], {}, path) : CommCost{};
  for (const auto& [name, entry] : json.items()) {
    const auto cost = cost_from(entry, fallback, path);
    check_cost(name, cost);
    cache.costs[name == "default" ? "" : name] = cost;
  }
}

// The caller holds the cache's mutex.
void load_costs(PlanCache& cache) {
  if (cache.costs_loaded) return;
  if (const char* path = std::getenv("DTENSOR_COST_FILE"); path && *path) load_file(path, cache);
  cache.costs_loaded = true;
}

}  // namespace

void set_comm_cost(std::string_view mesh_dim, const CommCost& cost) {
  check_cost(mesh_dim, cost);
  auto& cache = World::current().local<detail::PlanCache>();
  decltype(cache.entries) forgotten;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(cache.mutex);
  load_costs(cache);
  cache.costs[std::string(mesh_dim)] = cost;
  forgotten.swap(cache.entries);
}

CommCost comm_cost(const DeviceMesh& mesh, int64_t dim) {
  auto& cache = mesh.world().local<detail::PlanCache>();
  std::lock_guard<std::mutex> lock(cache.mutex);
  load_costs(cache);
  if (cache.costs.empty()) return {};
  for (const auto& name : {mesh.names()[dim], std::string()}) {
    if (auto it = cache.costs.find(name); it != cache.costs.end()) return it->second;
  }
  return {};
}

namespace redistribute {

namespace {

int64_t picoseconds(double seconds) { return std::llround(seconds * 1e12); }

}  // namespace

CostModel::CostModel(const Layout& layout)
    : mesh_sizes(layout.mesh().sizes()),
      sizes(layout.sizes()),
      element_size(static_cast<int64_t>(c10::elementSize(layout.dtype()))) {
  for (int64_t i = 0; i < layout.mesh().ndim(); ++i) costs.push_back(comm_cost(layout.mesh(), i));
}

double CostModel::largest_bytes(PlacementsRef placements) const {
  Sizes local(sizes.begin(), sizes.end());
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto& p = placements[i];
    if (p.is_shard()) local[p.dim] = longest_cut(local[p.dim], p, mesh_sizes[i]);
  }
  double bytes = static_cast<double>(element_size);
  for (int64_t n : local) bytes *= static_cast<double>(n);
  for (const auto& p : placements) {
    if (p.is_flat()) bytes = std::min(bytes, static_cast<double>(p.unit * element_size));
  }
  return bytes;
}

int64_t CostModel::step(PlacementsRef before, c10::IntArrayRef mesh_dims, const Placement& to) const {
  const auto from = before[mesh_dims.front()];
  double ranks = 1;
  CommCost cost = costs[mesh_dims.front()];
  Placements after(before.begin(), before.end());
  for (int64_t i : mesh_dims) {
    ranks *= static_cast<double>(mesh_sizes[i]);
    cost.latency = std::max(cost.latency, costs[i].latency);
    cost.bandwidth = std::min(cost.bandwidth, costs[i].bandwidth);
    cost.copy_bandwidth = std::min(cost.copy_bandwidth, costs[i].copy_bandwidth);
    after[i] = to;
  }
  if (ranks == 1) return 0;
  const double before_bytes = largest_bytes(before), after_bytes = largest_bytes(after);
  const double others = (ranks - 1) / ranks;  // the share of the data that comes from, or goes to, other ranks
  // Each phase reads or writes its data once more than it sends it: packing, adding or unpacking.
  const auto collective = [&](double bytes, double phases) {
    return picoseconds(cost.latency + phases * bytes * (others / cost.bandwidth + 1 / cost.copy_bandwidth));
  };
  const auto copy = [&](double bytes) { return picoseconds(bytes / cost.copy_bandwidth); };
  switch (transition(from, to)) {
    // The rank with the largest shard takes longest: the cost is as if all were as large.
    case Transition::all_gather:
    case Transition::flat_all_gather: return collective(std::max(after_bytes, before_bytes * ranks), 1);
    case Transition::reduce_scatter:
    case Transition::flat_reduce_scatter: return collective(std::max(before_bytes, after_bytes * ranks), 1);
    case Transition::all_reduce: return collective(before_bytes, 2);
    case Transition::all_to_all: return collective(before_bytes, 1) + copy(after_bytes);
    case Transition::flat_chunk:
    case Transition::chunk: return to.split > 1 ? copy(after_bytes) : 0;
    case Transition::to_partial: {
      const bool keeps = to.op == ReduceOp::avg || to.op == ReduceOp::min || to.op == ReduceOp::max;
      return keeps ? 0 : copy(after_bytes);
    }
    case Transition::none:
    case Transition::impossible: break;
  }
  return 0;
}

double all_reduce_seconds(const DeviceMesh& mesh, int64_t mesh_dim, int64_t bytes) {
  Placements pending(mesh.ndim(), replicate());
  pending[mesh_dim] = partial();
  const auto layout = Layout::get(mesh, pending, {bytes}, c10::ScalarType::Byte);
  return static_cast<double>(CostModel(*layout).step(pending, {mesh_dim}, replicate())) * 1e-12;
}

double pending_seconds(const DeviceMesh& mesh, int64_t mesh_dim, int64_t bytes) { return all_reduce_seconds(mesh, mesh_dim, bytes) / 2; }

double copy_seconds(const DeviceMesh& mesh, int64_t mesh_dim, double bytes) { return bytes / comm_cost(mesh, mesh_dim).copy_bandwidth; }

}  // namespace redistribute
}  // namespace dtensor
