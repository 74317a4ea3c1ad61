#include "src/dispatch/explicit.hpp"

#include <dtensor/error.hpp>
#include <fmt/ranges.h>
#include <dtensor/tensor.hpp>

#include <c10/core/ScalarType.h>

namespace dtensor {

namespace {
thread_local int explicit_depth = 0;
}

ExplicitCommunication::ExplicitCommunication() { ++explicit_depth; }
ExplicitCommunication::~ExplicitCommunication() { --explicit_depth; }

namespace dispatch {

void check_explicit(const Decision& decision) {
  if (explicit_depth == 0 || decision.info->name == "aten::_local_scalar_dense") return;
  for (const auto& move : decision.moves) {
    if (!move.communicates) continue;
    int64_t bytes = static_cast<int64_t>(c10::elementSize(move.from->dtype()));
    for (const auto size : move.from->local_sizes()) bytes *= size;
    fail(decision.info->name,
         "argument {} would be moved implicitly, but communication must be explicit here; got {}; needed {} ({} bytes on this "
         "rank); hint: dt::redistribute it before the call, or leave explicit_communication",
         move.element < 0 ? fmt::format("{}", move.argument) : fmt::format("{}[{}]", move.argument, move.element),
         move.from->str(), move.to->str(), bytes);
  }
}

}  // namespace dispatch
}  // namespace dtensor
