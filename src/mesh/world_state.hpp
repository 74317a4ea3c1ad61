// The meshes, layouts and communicators of one rank. Not installed; the core's own.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace dtensor {

class World;

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
  bool operator()(c10::IntArrayRef a, c10::IntArrayRef b) const {
    return std::ranges::lexicographical_compare(a, b);
  }
};

struct MeshState {
  c10::DeviceType device;
  std::vector<int> ranks;
  std::vector<int64_t> sizes;
  std::vector<std::string> names;

  bool member = false;                // the rank that made this mesh is in it
  std::vector<int64_t> coordinate{};  // of its first rank unless member
  std::shared_ptr<LayoutTable> layouts{};
  World* world = nullptr;                                                               // null once the world has ended
  std::map<std::vector<int64_t>, std::shared_ptr<comm::Communicator>, DimsLess> communicators{};  // by mesh dimensions, made on use
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
};

}  // namespace detail
}  // namespace dtensor
