// Gives each rank a generator, which torch::manual_seed seeds. ATen has only one default CPU generator per process, and ranks may be
// threads.
#pragma once

#include <ATen/core/Generator.h>

namespace dtensor {
class World;
}

namespace dtensor::detail {

// The CPU generator of a rank in a job of `ranks` ranks. A single rank gets the process's generator, because its other threads draw from
// that too; else a rank gets a new one. The first call installs a default generator of the process whose set_current_seed (which
// torch::manual_seed calls) also seeds the rank of the calling thread.
at::Generator make_rank_generator(int ranks);

// Whether operators of the calling thread that get no generator draw from its rank's generator, also on plain tensors. Else they draw from
// the process's.
void use_rank_generator(bool on);

// From now on operators of the calling thread look at the generator that they get, or that is the thread's, because it may be a
// dt::Generator. That holds also for a thread that is no rank, or no longer one.
void use_given_generators();

// What torch::manual_seed does on a rank: seeds the rank's generator (unless that is the process's, which is seeded anyway) and the rank's
// own stream.
void seed_rank(World& world, uint64_t seed);

// The seed of the process's generator, when ranks have generators of their own.
uint64_t seed_of_other_threads(uint64_t seed);

}  // namespace dtensor::detail
