// A generator per rank behind torch::manual_seed. ATen has one default CPU generator per process; ranks may be threads.
#pragma once

#include <ATen/core/Generator.h>

namespace dtensor {
class World;
}

namespace dtensor::detail {

// A new CPU generator for a rank. On first use, installs a process default generator whose set_current_seed (what
// torch::manual_seed calls) also seeds the calling thread's rank.
at::Generator make_rank_generator();

// Whether operators of the calling thread that are given no generator draw from its rank's, on plain tensors too, and not from
// the process's.
void use_rank_generator(bool on);

// From now on operators of the calling thread look at the generator that they are given, or that is the thread's, also when it is no rank
// or no longer one: it may be a dt::Generator.
void use_given_generators();

// torch::manual_seed on a rank: its generator, and with it the stream of its own.
void seed_rank(World& world, uint64_t seed);

}  // namespace dtensor::detail
