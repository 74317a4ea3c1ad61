#include "rng/rank_generator.hpp"

#include <dtensor/world.hpp>

#include "src/core/world_state.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <mutex>

namespace dtensor::detail {

namespace {

// Above every other key, and otherwise without a kernel: a mode of the calling thread that operators without a generator
// argument fall through at no cost.
constexpr c10::DispatchKey kRandomKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// -- torch::manual_seed -> the rank's generator ----------------------------------------------------------------------

// What torch::manual_seed seeds: itself, and the rank that the calling thread is.
class ForwardingGenerator final : public at::CPUGeneratorImpl {
 public:
  using at::CPUGeneratorImpl::CPUGeneratorImpl;

  void set_current_seed(uint64_t seed) override {
    at::CPUGeneratorImpl::set_current_seed(seed);
    auto* world = existing_world();
    if (!world) return;
    auto generator = world->generator();
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

// -- The rank's generator -> operators that take one -----------------------------------------------------------------

bool is_generator(const c10::Argument& argument) {
  if (argument.type()->kind() == c10::TypeKind::GeneratorType) return true;
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Gives the call the rank's generator, where it was given none, and goes on to the kernel below.
void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    if (value.isNone() && is_generator(arguments[i])) value = World::current().generator();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRandomKey), stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  static_assert(kRandomKey == c10::DispatchKey::TESTING_ONLY_GenericMode, "the library below is registered for this key");
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    const auto& arguments = op->schema().arguments();
    if (std::none_of(arguments.begin(), arguments.end(), is_generator)) continue;
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
  }
}

}  // namespace

at::Generator make_rank_generator() {
  static std::once_flag once;
  std::call_once(once, install_forwarding_generator);
  return at::make_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator().current_seed());
}

void use_rank_generator(bool on) { c10::impl::tls_set_dispatch_key_included(kRandomKey, on); }

}  // namespace dtensor::detail
