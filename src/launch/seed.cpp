#include "src/launch/seed.hpp"

#include "src/comm/reduce.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <range/v3/numeric/iota.hpp>

#include <mutex>
#include <vector>

namespace dtensor::detail {

// What the process began with: whoever finds another one has seeded.
static const uint64_t seed_at_start = at::detail::getDefaultCPUGenerator().current_seed();

void agree_on_seed(comm::Transport& host) {
  std::vector<int> ranks(host.size());
  ranges::iota(ranks, 0);
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto mine = comm::empty({1}, c10::ScalarType::Long);
  *mine.data_ptr<int64_t>() = static_cast<int64_t>(generator.current_seed());
  const auto all = host.connect("seed", ranks)->all_gather(mine, std::vector<int64_t>(ranks.size(), 1)).get();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  if (generator.current_seed() == seed_at_start) generator.set_current_seed(static_cast<uint64_t>(*all.data_ptr<int64_t>()));
}

}  // namespace dtensor::detail
