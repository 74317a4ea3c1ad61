// A rank's view of the job: which world the calling thread is in, and what the world keeps.
#include <dtensor/mesh/world.hpp>

#include <dtensor/base/error.hpp>

#include "src/base/caller.hpp"
#include "src/base/regions.hpp"
#include "src/mesh/rank_stream.hpp"
#include "src/mesh/world_state.hpp"

#include <c10/util/hash.h>
#include <range/v3/numeric/iota.hpp>

namespace dtensor {

namespace {

thread_local World* current_world = nullptr;
thread_local std::unique_ptr<World> world_of_one;

struct WorldSetting {
  World* world;

  static WorldSetting now() { return {current_world}; }
  void apply() const {
    current_world = world;
    detail::rank_stream.use(world != nullptr);
  }
};

}  // namespace

World::World(std::unique_ptr<comm::Transport> transport)
    : transport_(std::move(transport)),
      generator_(detail::rank_stream.make(transport_->size())),
      state_(std::make_shared<detail::WorldState>(*this)) {
  transport_->record_in(local<comm::Events>());
}

World::~World() { detail::rank_stream.forget(*this); }

void World::barrier() {
  if (!everyone_) {
    std::vector<int> ranks(size());
    ranges::iota(ranks, 0);
    everyone_ = state_->connect("world", ranks);
  }
  everyone_->barrier();
}

World& World::current() {
  if (current_world) return *current_world;
  if (!world_of_one) world_of_one = std::make_unique<World>(std::move(comm::make_threads_transports(1).front()));
  return *world_of_one;
}

World::Use::Use(World& world) : region_(detail::RegionOf<WorldSetting>::begin({&world})) {}
World::Use::~Use() { region_->end(); }

namespace detail {

RankStream rank_stream;

namespace {

const bool errors_name_ranks = [] {
  caller = +[] {
    const auto* world = existing_world();
    return world ? Caller{world->rank(), world->size()} : Caller();
  };
  return true;
}();

}  // namespace

World* existing_world() { return current_world ? current_world : world_of_one.get(); }

// Meshes and layouts may outlive the world; communicators must not.
WorldState::~WorldState() {
  for (auto& [hash, mesh] : meshes) {
    mesh->world = nullptr;
    mesh->communicators.clear();
  }
}

std::shared_ptr<MeshState> WorldState::intern(MeshState mesh) {
  const size_t hash = c10::get_hash(static_cast<int>(mesh.device), mesh.ranks, mesh.sizes);
  std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto [first, last] = meshes.equal_range(hash);
  for (auto it = first; it != last; ++it) {
    const auto& other = *it->second;
    if (other.device == mesh.device && other.ranks == mesh.ranks && other.sizes == mesh.sizes &&
        other.names == mesh.names) {
      return it->second;
    }
  }
  mesh.world = &world;
  mesh.layouts = layouts;
  return meshes.emplace(hash, std::make_shared<MeshState>(std::move(mesh)))->second;
}

std::shared_ptr<comm::Communicator> WorldState::connect(const std::string& name, const std::vector<int>& ranks) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto& slot = communicators[{name, ranks}];
  if (!slot) slot = world.transport().connect(name, ranks);
  return slot;
}

}  // namespace detail
}  // namespace dtensor
