// The seed that the ranks of a job begin with.
#pragma once

#include <dtensor/comm/transport.hpp>

namespace dtensor::detail {

// A process that seeded nothing so far takes the seed of rank 0: libtorch gives each process a seed of its own, at random. Ranks that are
// threads share their process's. One small all_gather, which leaves no event.
void agree_on_seed(comm::Transport& host);

}  // namespace dtensor::detail
