// The ranks of the world, shared out by name.
//
//   const rl::ResourcePool pool{{"actor", 4}, {"critic", 2}, {"rewards", 1}};
//   const auto mesh = pool.mesh("actor", {2, 2}, {"dp", "tp"});
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/world.hpp>

#include <fmt/ranges.h>

#include <initializer_list>
#include <map>
#include <numeric>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Shares have ranks that follow each other, in the order given; ranks that are left over are in none. Roles on one share are colocated.
// Made alike on every rank; communicates nothing.
class ResourcePool {
 public:
  // Names and numbers of ranks; one number may be -1: all that the others leave. Throws where they ask for more ranks than there are, for
  // other numbers below 1, and for a name that comes twice.
  ResourcePool(std::initializer_list<std::pair<std::string, int64_t>> shares);

  // Throws, with the names that there are, for another name.
  const std::vector<int>& ranks(const std::string& name) const;
  // Over all ranks of a share, or in one dimension: "dp". Throws for sizes of another product.
  DeviceMesh mesh(const std::string& name, std::vector<int64_t> sizes, std::vector<std::string> names,
                  c10::DeviceType device = c10::DeviceType::CPU) const;
  DeviceMesh mesh(const std::string& name) const { return mesh(name, {static_cast<int64_t>(ranks(name).size())}, {"dp"}); }

 private:
  std::map<std::string, std::vector<int>> shares_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {
inline constexpr const char* kPool = "rl::ResourcePool";
}

inline ResourcePool::ResourcePool(std::initializer_list<std::pair<std::string, int64_t>> shares) {
  const int64_t all = World::current().size();
  int64_t asked = 0, open = 0;
  std::string list;
  for (const auto& [name, count] : shares) {
    require(count == -1 || count >= 1, detail::kPool, "'{}' asks for {} ranks; expected 1 or more, or -1 for the rest", name, count);
    list += fmt::format("{}{}={}", list.empty() ? "" : ", ", name, count);
    (count == -1 ? open : asked) += count == -1 ? 1 : count;
  }
  require(open <= 1, detail::kPool, "got {}; expected one share of -1 at most", list);
  if (asked + open > all) {
    fail(detail::kPool, "the shares ask for {} ranks, and there are {}; got {}; hint: start {} ranks, or put roles on one share",
         asked + open, all, list, asked + open);
  }
  int next = 0;
  for (const auto& [name, count] : shares) {
    std::vector<int> ranks(count == -1 ? all - asked : count);
    std::iota(ranks.begin(), ranks.end(), next);
    next += static_cast<int>(ranks.size());
    require(shares_.emplace(name, std::move(ranks)).second, detail::kPool, "'{}' comes twice; got {}", name, list);
  }
}

inline const std::vector<int>& ResourcePool::ranks(const std::string& name) const {
  const auto found = shares_.find(name);
  if (found != shares_.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [other, ranks] : shares_) names.push_back(other);
  fail(detail::kPool, "there is no share '{}'; got {}", name, names);
}

inline DeviceMesh ResourcePool::mesh(const std::string& name, std::vector<int64_t> sizes, std::vector<std::string> names,
                                     c10::DeviceType device) const {
  const auto& own = ranks(name);
  const auto product = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  require(product == static_cast<int64_t>(own.size()), detail::kPool, "a mesh of {} has {} ranks; expected the {} of '{}'", sizes, product,
          own.size(), name);
  return DeviceMesh(device, own, std::move(sizes), std::move(names));
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
