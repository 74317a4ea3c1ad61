// The generators that a rank draws from on devices other than the CPU.
#pragma once

#include <ATen/core/Generator.h>

#pragma GCC visibility push(default)

namespace dtensor {
class World;
}

namespace dtensor::rng {

// The generator that the rank draws tensors on `device` from. On the CPU that is World::generator(). If World::generator() is a
// dt::Generator, it is used on every device. Else it is libtorch's default generator of the device. Ranks that are threads would share that
// one, so each of them gets a generator of its own.
at::Generator generator_for(World& world, c10::Device device);

}  // namespace dtensor::rng

#pragma GCC visibility pop
