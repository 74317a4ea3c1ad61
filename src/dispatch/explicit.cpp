#include "src/dispatch/explicit.hpp"

#include "src/base/fast_thread_local.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/dispatch/explicit.hpp>
#include <fmt/ranges.h>

#include <c10/core/ScalarType.h>

namespace dtensor {

namespace {
DTENSOR_FAST_THREAD_LOCAL int explicit_depth = 0;
}

ExplicitCommunication::ExplicitCommunication() { ++explicit_depth; }
ExplicitCommunication::~ExplicitCommunication() { --explicit_depth; }

namespace dispatch {

void check_explicit(const OpInfo& info, int argument, int element, std::string_view what, const Layout& from, const Layout& to) {
  if (explicit_depth == 0 || info.name == "aten::_local_scalar_dense") return;
  int64_t bytes = static_cast<int64_t>(c10::elementSize(from.dtype()));
  for (const auto size : from.local_sizes()) bytes *= size;
  fail(info.name,
       "argument {} would be {} implicitly, but communication must be explicit here; got {}; needed {} ({} bytes on this "
       "rank); hint: dt::redistribute the operands before the call, or leave explicit_communication",
       element < 0 ? fmt::format("{}", argument) : fmt::format("{}[{}]", argument, element), what, from.str(), to.str(), bytes);
}

void check_explicit(const OpInfo& info, const Move& move) {
  if (move.communicates) check_explicit(info, move.argument, move.element, "moved", *move.from, *move.to);
}

void check_explicit(const Decision& decision) {
  if (explicit_depth == 0) return;
  for (const auto& move : decision.moves) {
    const bool by_group = move.from->is_flat();  // perhaps: that hangs on the tensor
    if (move.communicates && !by_group) check_explicit(*decision.info, move.argument, move.element, "moved", *move.from, *move.to);
  }
  for (const auto& back : decision.write_backs) {
    if (back.communicates) check_explicit(*decision.info, back.argument, back.element, "brought back", *back.written, *back.home);
  }
}

}  // namespace dispatch
}  // namespace dtensor
