#include <dtensor/rng/device_generator.hpp>

#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/random.hpp>

#include "rng/counter_generator.hpp"
#include "rng/streams.hpp"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace dtensor::rng {

at::Generator generator_for(World& world, c10::Device device) {
  const auto& common = world.generator();
  if (!device.is_cuda() || as_counter(common)) return common;
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  const auto& of_process = at::globalContext().defaultGenerator(device);
  const bool local = RankLocalRandom::active();
  if (!local && (world.size() == 1 || world.transport().name() != "threads")) return of_process;
  auto& own = world.local<Streams>().of_devices[{device.index(), local}];
  if (!own.defined()) {
    own = of_process.clone();
    own.set_current_seed(common.current_seed());
  }
  return own;
}

}  // namespace dtensor::rng
