// What one rank keeps: its meshes, layouts, communicators and move plans. Not installed; the core's own.
#pragma once

#include <dtensor/layout.hpp>
#include <dtensor/redistribute.hpp>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace dtensor {

class World;
class GradientBuckets;

// The layouts that exist. It holds them weakly: a layout leaves the table when its last user lets go. Layouts and
// meshes share its ownership, since they may outlive their World.
struct LayoutTable {
  std::mutex mutex;
  std::unordered_multimap<size_t, c10::weak_intrusive_ptr<Layout>> layouts;

  // The layout that equals these, whose hash is `hash`; null when there is none. The caller holds the mutex.
  LayoutPtr find(size_t hash, const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                 c10::ScalarType dtype, bool deferred) const;
  void add(const LayoutPtr& layout, size_t hash, const std::shared_ptr<LayoutTable>& self);
  void remove(const Layout& layout);
};

namespace detail {

// The calling thread's world, or null when it has not been in one yet.
World* existing_world();

// Orders lists of mesh dimensions, owned or not.
struct DimsLess {
  using is_transparent = void;
  bool operator()(c10::IntArrayRef a, c10::IntArrayRef b) const { return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end()); }
};

struct MeshState {
  c10::DeviceType device;
  std::vector<int> ranks;
  std::vector<int64_t> sizes;
  std::vector<std::string> names;

  bool member = false;                // the rank that made this mesh is in it
  std::vector<int64_t> coordinate{};  // empty unless member
  std::shared_ptr<LayoutTable> layouts{};
  World* world = nullptr;                                                               // null once the world has ended
  std::map<std::vector<int64_t>, std::shared_ptr<comm::Communicator>, DimsLess> communicators{};  // by mesh dimensions, made on use
};

// Move plans by (from, to), bounded. An entry holds both layouts, so that their addresses stay theirs.
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

// The plain tensors and generators of one mesh that were compared between its ranks. What a rank remembers of calls does not say: a rank
// that was busy on other meshes has forgotten other calls than its peers.
struct Compared {
  int64_t distributed = 0;              // by distribute_tensor: how many there were, of which some were compared
  std::unordered_set<size_t> operands;  // of operators, by a hash of what they were: those that were the first of their kind
  int64_t calls = 0;                    // of operators with such operands
  int64_t draws = 0;                    // of random operators

  // Which of them are compared: the first ones, where most programs go wrong, and some for as long as it trains.
  static bool is_due(int64_t count) {
    constexpr int64_t kFirst = 16, kEvery = 1024;
    return count < kFirst || count % kEvery == 0 || (count & (count - 1)) == 0;
  }
};

struct WorldState : std::enable_shared_from_this<WorldState> {
  explicit WorldState(World& world) : world(world) {}
  ~WorldState();

  // The one mesh that equals `mesh`, which becomes it when there is none.
  std::shared_ptr<MeshState> intern(MeshState mesh);

  // The communicator of this name among these ranks; shared by all meshes that have it.
  std::shared_ptr<comm::Communicator> connect(const std::string& name, const std::vector<int>& ranks);

  World& world;
  std::recursive_mutex mutex;  // guards meshes, communicators and MeshState::communicators
  std::multimap<size_t, std::shared_ptr<MeshState>> meshes;
  std::map<std::pair<std::string, std::vector<int>>, std::shared_ptr<comm::Communicator>> communicators;
  std::shared_ptr<LayoutTable> layouts = std::make_shared<LayoutTable>();
  PlanCache plans;
  std::unordered_map<const void*, Compared> compared;  // by mesh
  std::shared_ptr<GradientBuckets> gradient_buckets;   // made on use
  std::atomic<int> no_sync = 0;                        // how many NoSync live
  at::Generator rank_local;                            // the rank's own stream, undefined until it is drawn from
  std::map<std::pair<int, bool>, at::Generator> device_generators;  // by CUDA device, and whether it is the rank's own stream
};

}  // namespace detail
}  // namespace dtensor
