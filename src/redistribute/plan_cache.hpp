// The cache of plans and the costs of a rank.
#pragma once

#include <dtensor/mesh/world.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace dtensor::detail {

// Move plans by (from, to), bounded. An entry keeps both layouts alive, so that no other layout gets their addresses.
struct PlanCache {
  struct Entry {
    LayoutPtr from, to;
    std::shared_ptr<const MovePlan> plan;
  };
  struct Hash {
    size_t operator()(const std::pair<const Layout*, const Layout*>& key) const;
  };
  static constexpr size_t kCapacity = 4096;

  std::mutex mutex;
  std::unordered_map<std::pair<const Layout*, const Layout*>, Entry, Hash> entries;
  std::map<std::string, CommCost, std::less<>> costs;  // by mesh dimension name; "" is the default
  bool costs_loaded = false;
};

}  // namespace dtensor::detail
