#include <dtensor/rng/lent_stream.hpp>

#include <dtensor/rng/position.hpp>
#include "rng/counter_generator.hpp"
#include "rng/mt19937.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <map>

namespace dtensor::rng {

// -- Which threads were lent which stream -------------------------------------------------------------------------------------

namespace {

struct Lendings {
  std::mutex mutex;
  std::map<std::thread::id, std::shared_ptr<LentStream>> of;
  std::atomic<uint64_t> changes{0};
};

Lendings& lendings() {
  static auto* instance = new Lendings;  // outlives every thread
  return *instance;
}

// What the calling thread found at its last look, and how many changes there had been then.
struct Found {
  uint64_t changes = 0;
  std::shared_ptr<LentStream> stream;
};
thread_local Found found;

}  // namespace

std::shared_ptr<void> lend(const std::shared_ptr<LentStream>& stream, const std::vector<std::thread>& to) {
  std::vector<std::thread::id> ids;
  for (const auto& thread : to) ids.push_back(thread.get_id());
  {
    std::lock_guard<std::mutex> lock(lendings().mutex);
    for (const auto id : ids) lendings().of[id] = stream;
    ++lendings().changes;
  }
  return std::shared_ptr<void>(nullptr, [stream, ids](void*) {
    std::lock_guard<std::mutex> lock(lendings().mutex);
    for (const auto id : ids) {
      const auto it = lendings().of.find(id);
      if (it != lendings().of.end() && it->second == stream) lendings().of.erase(it);
    }
    ++lendings().changes;
  });
}

LentStream* lent_to_this_thread() {
  const auto changes = lendings().changes.load(std::memory_order_acquire);
  if (found.changes != changes) {
    std::lock_guard<std::mutex> lock(lendings().mutex);
    const auto it = lendings().of.find(std::this_thread::get_id());
    found = {lendings().changes, it == lendings().of.end() ? nullptr : it->second};
  }
  return found.stream.get();
}

// -- The stream ---------------------------------------------------------------------------------------------------------------

LentStream::LentStream(at::Generator generator, bool shared) : from_(std::move(generator)) {
  if (shared) std::call_once(started_, [&] { generator_ = from_; });
}

void LentStream::start() {
  std::call_once(started_, [&] {
    std::lock_guard<std::mutex> lock(from_.mutex());
    generator_ = copy_of(from_);
  });
}

at::Generator LentStream::generator() {
  start();
  return generator_;
}

at::Generator LentStream::draw() {
  start();
  drawn_.store(true, std::memory_order_release);
  return generator_;
}

void move_far(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (auto* counter = as_counter(generator)) return counter->set_offset(counter->get_offset() + (uint64_t{1} << 40));
  auto* cpu = generator.get<at::CPUGeneratorImpl>();
  auto engine = cpu->engine();
  skip(engine, uint64_t{1} << 62);
  cpu->set_engine(engine);
  cpu->set_next_float_normal_sample({});
  cpu->set_next_double_normal_sample({});
}

// -- Operators of those threads -----------------------------------------------------------------------------------------------

namespace {

constexpr c10::DispatchKey kEveryThread = c10::DispatchKey::BackendSelect;  // a key that calls of any thread pass

bool takes(const c10::FunctionSchema& schema, c10::TypeKind kind) {
  return std::ranges::any_of(schema.arguments(), [&](const c10::Argument& argument) {
    const auto* optional = argument.type()->castRaw<c10::OptionalType>();
    return (optional ? *optional->getElementType() : *argument.type()).kind() == kind;
  });
}

void draw_from_lent(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  if (auto* lent = lent_to_this_thread()) [[unlikely]] {
    const auto& arguments = op.schema().arguments();
    const auto begin = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* optional = arguments[i].type()->castRaw<c10::OptionalType>();
      const bool open = optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType && (*stack)[begin + i].isNone();
      if (!open) continue;
      auto generator = lent->draw();
      (*stack)[begin + i] = generator;
      if (auto* counter = as_counter(generator)) {
        std::lock_guard<std::mutex> lock(generator.mutex());  // of which others are counting too
        if (draws_by_counter(op)) return draw_by_counter(op, *counter, *stack);
      }
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kEveryThread), stack);
}

// Only operators that write a tensor: factories have a kernel of libtorch's for this key, and call these operators.
TORCH_LIBRARY_IMPL(aten, BackendSelect, library) {
  static_assert(kEveryThread == c10::DispatchKey::BackendSelect, "the library is registered for this key");
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    if (!takes(op->schema(), c10::TypeKind::GeneratorType) || !takes(op->schema(), c10::TypeKind::TensorType)) continue;
    if (op->hasKernelForDispatchKey(kEveryThread)) continue;
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&draw_from_lent>());
  }
}

}  // namespace

}  // namespace dtensor::rng
