#include "rng/rank_generator.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/tensor.hpp>

#include "rng/check.hpp"
#include "rng/counter_generator.hpp"
#include "src/mesh/rank_stream.hpp"
#include "src/mesh/world_state.hpp"

#include <dtensor/rng/device_generator.hpp>
#include <dtensor/rng/lent_stream.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string_view>

namespace dtensor::detail {

namespace {

// A key above all others, used as a mode of the calling thread. Operators that draw, and those of ops/composite/, have kernels for it; all
// others fall through at no cost.
constexpr c10::DispatchKey kRandomKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// -- The process's generator -> the rank's ---------------------------------------------------------------------------

// ATen's default generator. It passes each call on to the generator of the rank that the calling thread is.
class ForwardingGenerator final : public at::CPUGeneratorImpl {
 public:
  using Base = at::CPUGeneratorImpl;
  using Base::Base;

  // Threads that are not ranks draw from the process's generator, unless they were lent a stream. With one rank, that is also the rank's
  // generator. With several, it gets a seed of its own, so that these threads draw other numbers than any rank.
  void set_current_seed(uint64_t seed) override {
    auto* world = existing_world();
    if (auto* lent = rng::lent_to_this_thread()) return lent->draw().set_current_seed(seed);
    if (!RankLocalRandom::active()) Base::set_current_seed(world && world->size() > 1 ? seed_of_other_threads(seed) : seed);
    if (world) seed_rank(*world, seed);
  }
  uint64_t current_seed() const override { return own() ? own()->current_seed() : Base::current_seed(); }
  void set_state(const c10::TensorImpl& state) override { own() ? own()->set_state(state) : Base::set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own() ? own()->get_state() : Base::get_state(); }

 private:
  at::CPUGeneratorImpl* clone_impl() const override {
    auto* copy = new at::CPUGeneratorImpl();
    copy->set_state(*get_state());
    return copy;
  }

  // The thread's own generator: a rank's, or that of a stream that it was lent. Null if it is this one.
  c10::GeneratorImpl* own() const {
    if (auto* lent = rng::lent_to_this_thread()) return other_than_this(lent->draw());
    auto* world = existing_world();
    return world ? other_than_this(world->generator()) : nullptr;
  }
  c10::GeneratorImpl* other_than_this(const at::Generator& generator) const {
    auto* impl = generator.unsafeGetGeneratorImpl();
    return impl == this ? nullptr : impl;
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

thread_local bool is_rank = false, has_generators = false;  // why a thread is in the mode

bool is_generator(const c10::Argument& argument) {
  if (argument.type()->kind() == c10::TypeKind::GeneratorType) return true;
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// The device on which an operator draws.
c10::Device device_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined()) return value.toTensor().device();
  }
  const auto at = schema.argumentIndexWithName("device");
  if (at && arguments[*at].isDevice()) return arguments[*at].toDevice();
  const auto* mesh = Spmd::current();
  return at && mesh ? c10::Device(mesh->device_type()) : c10::Device(c10::kCPU);
}

// The rank that draws. Autograd runs a backward pass on a GPU in a thread of its own, which is no rank; there the operands tell the rank.
World& world_of(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && is_dtensor(value.toTensor())) return DTensor(value.toTensor()).mesh().world();
  }
  return World::current();
}

bool is_plain(const c10::IValue& self) { return self.isTensor() && !is_dtensor(self.toTensor()); }

// Gives the call the rank's generator if it has none, and goes on to the kernel below.
void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  bool by_counter = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_generator(arguments[i])) continue;
    auto& value = (*stack)[begin + i];
    const auto given = c10::ArrayRef<c10::IValue>(*stack).slice(begin);
    auto& world = world_of(given);
    if (value.isNone()) {
      value = rng::generator_for(world, device_of(op.schema(), given));
    } else {
      rng::check_owner(value.toGenerator(), world);
    }
    rng::check_draw(op, given, value.toGenerator());
    auto* counter = rng::as_counter(value.toGenerator());
    by_counter |= counter != nullptr;
    if (counter && rng::draws_by_counter(op) && is_plain((*stack)[begin])) return rng::draw_by_counter(op, *counter, *stack);
  }
  if (begin < stack->size() && (*stack)[begin].isTensor()) keys = keys.remove(c10::DispatchKey::BackendSelect);  // it has its generator
  try {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRandomKey), stack);
  } catch (const c10::Error& error) {
    const std::string_view words = error.what_without_backtrace();
    const bool unknown = by_counter && words.find("Expected a 'cpu'") != words.npos && words.find("generator") != words.npos;
    require(!unknown, op.schema().name(),
            "is not drawn by dt::Generator; hint: give it a generator of libtorch, at::make_generator<at::CPUGeneratorImpl>(seed)");
    throw;
  }
}

// A factory that takes no generator: torch::randn(sizes). The operators that it calls find the rank's generator; here the ranks compare
// theirs.
void draw_factory(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto given = c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - op.schema().arguments().size());
  rng::check_draw(op, given, rng::generator_for(World::current(), device_of(op.schema(), given)));
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRandomKey), stack);
}

bool is_random_factory(const c10::OperatorHandle& op) {
  const auto takes_tensor = [](const c10::Argument& argument) { return argument.type()->isSubtypeOf(*c10::TensorType::get()); };
  const auto& arguments = op.schema().arguments();
  return op.hasTag(at::Tag::nondeterministic_seeded) && std::ranges::none_of(arguments, takes_tensor);
}

// ATen's kernel takes no dt::Generator. So plain tensors are drawn here, and distributed ones in the operator's rule.
void draw_normal(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto arguments = c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - op.schema().arguments().size());
  const auto given = arguments[2].isNone() ? world_of(arguments).generator() : arguments[2].toGenerator();
  const bool plain = std::ranges::none_of(arguments, [](const auto& a) { return a.isTensor() && !is_plain(a); });
  rng::as_counter(given) && plain ? rng::normal_by_counter(op, given, *stack) : draw(op, keys, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  static_assert(kRandomKey == c10::DispatchKey::TESTING_ONLY_GenericMode, "the library below is registered for this key");
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    if (name.name == "aten::randint_like" && name.overload_name.rfind("Tensor", 0) == 0) continue;  // composite.cpp calls that of a number
    const auto& arguments = op->schema().arguments();
    if (std::ranges::none_of(arguments, is_generator)) {
      if (is_random_factory(*op)) library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&draw_factory>());
      continue;
    }
    library.impl(c10::toString(name).c_str(), rng::is_normal_of_tensors(*op) ? torch::CppFunction::makeFromBoxedFunction<&draw_normal>()
                                                                             : torch::CppFunction::makeFromBoxedFunction<&draw>());
  }
}

}  // namespace

at::Generator make_rank_generator(int ranks) {
  static std::once_flag once;
  std::call_once(once, install_forwarding_generator);
  if (ranks == 1) return at::detail::getDefaultCPUGenerator();
  return at::make_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator().current_seed());
}

void use_rank_generator(bool on) {
  is_rank = on;
  c10::impl::tls_set_dispatch_key_included(kRandomKey, is_rank || has_generators);
}

void use_given_generators() {
  has_generators = true;
  use_rank_generator(is_rank);
}

namespace {

const bool ranks_have_streams = [] {
  rank_stream = {make_rank_generator, use_rank_generator, rng::forget_owner};
  return true;
}();

}  // namespace

}  // namespace dtensor::detail
