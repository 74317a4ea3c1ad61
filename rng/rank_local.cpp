// The stream of random numbers of dt::rank_local_random(), which each rank has for itself.
#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/random.hpp>

#include "rng/rank_generator.hpp"
#include "rng/streams.hpp"
#include "src/base/regions.hpp"
#include "src/mesh/world_state.hpp"

#include <ATen/CPUGeneratorImpl.h>

namespace dtensor {

namespace {

thread_local bool is_active = false;

// One round of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
  value = (value ^ value >> 27) * 0x94d049bb133111eb;
  return value ^ value >> 31;
}

uint64_t own_seed(uint64_t seed, int rank) { return mix(mix(seed) + static_cast<uint64_t>(rank)); }

// What a rank draws from.
struct StreamSetting {
  std::weak_ptr<detail::WorldState> rank;  // which may be gone when the region ends
  at::Generator generator;
  bool active;

  static StreamSetting now() {
    auto& world = World::current();
    return {world.state().weak_from_this(), world.generator(), is_active};
  }
  void apply() const {
    if (const auto state = rank.lock()) state->world.generator() = generator;
    is_active = active;
  }
};

StreamSetting own_stream() {
  auto setting = StreamSetting::now();
  if (setting.active) return setting;
  auto& world = World::current();
  auto& own = world.local<rng::Streams>().own;
  if (!own.defined()) own = at::make_generator<at::CPUGeneratorImpl>(own_seed(setting.generator.current_seed(), world.rank()));
  return {setting.rank, own, true};
}

}  // namespace

RankLocalRandom::RankLocalRandom() : region_(detail::RegionOf<StreamSetting>::begin(own_stream())) {}
RankLocalRandom::~RankLocalRandom() { region_->end(); }

bool RankLocalRandom::active() { return is_active; }

namespace detail {

uint64_t seed_of_other_threads(uint64_t seed) { return own_seed(seed, -1); }

void seed_rank(World& world, uint64_t seed) {
  auto generator = world.generator();
  std::unique_lock<std::mutex> lock(generator.mutex(), std::defer_lock);
  const bool seeded = generator == at::detail::getDefaultCPUGenerator();  // by the caller, who holds its mutex
  if (!seeded) lock.lock();
  auto& of_devices = world.local<rng::Streams>().of_devices;
  for (auto it = of_devices.begin(); it != of_devices.end();) it = !is_active || it->first.second ? of_devices.erase(it) : std::next(it);
  if (is_active) return generator.set_current_seed(own_seed(seed, world.rank()));
  if (!seeded) generator.set_current_seed(seed);
  world.local<rng::Streams>().own = {};
}

}  // namespace detail
}  // namespace dtensor
