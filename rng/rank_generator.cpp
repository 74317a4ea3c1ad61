#include "rng/rank_generator.hpp"

#include <dtensor/world.hpp>

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace dtensor::detail {

namespace {

// What torch::manual_seed seeds: itself, and the rank that the calling thread is.
class ForwardingGenerator final : public at::CPUGeneratorImpl {
 public:
  using at::CPUGeneratorImpl::CPUGeneratorImpl;

  void set_current_seed(uint64_t seed) override {
    at::CPUGeneratorImpl::set_current_seed(seed);
    auto generator = World::current().generator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  }
};

void install_forwarding_generator() {
  auto& installed = const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator());
  const auto state = installed.get_state();
  auto forwarding = at::make_generator<ForwardingGenerator>(installed.current_seed());
  forwarding.set_state(state);
  installed = forwarding;
}

}  // namespace

at::Generator make_rank_generator() {
  static std::once_flag once;
  std::call_once(once, install_forwarding_generator);
  return at::make_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator().current_seed());
}

}  // namespace dtensor::detail
