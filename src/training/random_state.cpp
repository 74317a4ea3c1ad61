#include "src/training/random_state.hpp"

#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/random.hpp>

#include <dtensor/rng/device_generator.hpp>

#include <optional>

namespace dtensor::detail {

namespace {

// Calls fn with the rank's generator or, if `own`, with that of rank_local_random(). Inside such a region only the latter can be had.
template <class Fn>
void with_generator(c10::Device device, bool own, Fn&& fn) {
  std::optional<RankLocalRandom> region;
  if (own && !RankLocalRandom::active()) region.emplace();
  auto generator = rng::generator_for(World::current(), device);
  fn(generator);
}

}  // namespace

RandomState RandomState::now(const std::vector<c10::Device>& devices) {
  RandomState result;
  const auto add = [&](c10::Device device, bool own) {
    with_generator(device, own, [&](at::Generator& generator) { result.streams_.push_back({device, own, generator.get_state()}); });
  };
  for (const bool own : {false, true}) {
    if (!own && RankLocalRandom::active()) continue;
    add(c10::Device(c10::kCPU), own);
    for (const auto& device : devices) add(device, own);
  }
  return result;
}

void RandomState::apply() const {
  for (const auto& stream : streams_) {
    with_generator(stream.device, stream.own, [&](at::Generator& generator) { generator.set_state(stream.state); });
  }
}

}  // namespace dtensor::detail
