// A generator per rank behind torch::manual_seed. ATen has one default CPU generator per process; ranks may be threads.
#pragma once

#include <ATen/core/Generator.h>

namespace dtensor {
class World;
}

namespace dtensor::detail {

// The CPU generator of one of so many ranks: of one alone the process's, as threads of its own draw from it too; else a new one. On first
// use, installs a process default generator whose set_current_seed (what torch::manual_seed calls) also seeds the calling thread's rank.
at::Generator make_rank_generator(int ranks);

// Whether operators of the calling thread that are given no generator draw from its rank's, on plain tensors too, and not from
// the process's.
void use_rank_generator(bool on);

// From now on operators of the calling thread look at the generator that they are given, or that is the thread's, also when it is no rank
// or no longer one: it may be a dt::Generator.
void use_given_generators();

// torch::manual_seed on a rank: its generator, unless that is the process's, which is then seeded, and with it the stream of its own.
void seed_rank(World& world, uint64_t seed);

// Of the process's generator where ranks have others.
uint64_t seed_of_other_threads(uint64_t seed);

}  // namespace dtensor::detail
