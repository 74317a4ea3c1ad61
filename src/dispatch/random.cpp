// Operators that draw random numbers: from the rank's own generator, never from the process's.
#include "src/dispatch/execute.hpp"
#include "src/dispatch/guard.hpp"

#include <dtensor/error.hpp>
#include <dtensor/world.hpp>

#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>

#include <unordered_map>

namespace dtensor::dispatch {

namespace {

// Factories whose generator is an argument of another overload.
const std::unordered_map<std::string, std::pair<const char*, int>> kGeneratorOverloads{
    {"aten::rand", {"generator", 1}},        {"aten::randn", {"generator", 1}},
    {"aten::randint", {"generator", 2}},     {"aten::randint.low", {"low_generator", 3}},
    {"aten::randperm", {"generator", 1}},
};

}  // namespace

void run_random(const c10::OperatorHandle& op, Stack& stack, size_t begin, const OpInfo& info) {
  const c10::IValue generator(World::current().generator());
  const auto overload = kGeneratorOverloads.find(info.name);
  if (info.generator >= 0) {
    auto& argument = stack[begin + info.generator];
    if (argument.isNone()) argument = generator;
    op.callBoxed(&stack);
  } else if (overload != kGeneratorOverloads.end()) {
    const auto& [name, position] = overload->second;
    stack.insert(stack.begin() + static_cast<int64_t>(begin) + position, generator);
    c10::Dispatcher::singleton().findSchemaOrThrow(info.schema->name().c_str(), name).callBoxed(&stack);
  } else {
    op.callBoxed(&stack);
  }
}

}  // namespace dtensor::dispatch
