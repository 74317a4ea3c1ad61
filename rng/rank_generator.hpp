// A generator per rank behind torch::manual_seed. ATen has one default CPU generator per process; ranks may be threads.
#pragma once

#include <ATen/core/Generator.h>

namespace dtensor::detail {

// A new CPU generator for a rank. On first use, installs a process default generator whose set_current_seed (what
// torch::manual_seed calls) also seeds the calling thread's rank.
at::Generator make_rank_generator();

}  // namespace dtensor::detail
