// A rank's generators of other devices than the CPU.
#pragma once

#include <ATen/core/Generator.h>

namespace dtensor {
class World;
}

namespace dtensor::rng {

// What the rank draws tensors on `device` from: World::generator() on the CPU, and everywhere when that is a dt::Generator; else libtorch's
// default generator of the device or, where ranks are threads, which share that one, one of the rank's own.
at::Generator generator_for(World& world, c10::Device device);

}  // namespace dtensor::rng
