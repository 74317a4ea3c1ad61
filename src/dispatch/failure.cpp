#include "src/dispatch/failure.hpp"

#include "src/comm/failed_operators.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/error_text.hpp>
#include <dtensor/comm/transport.hpp>
#include <dtensor/mesh/world.hpp>

#include <fmt/ranges.h>

#include <exception>

namespace dtensor::dispatch {

namespace {

// "aten::mm (S(0)) [4, 8] (R) [8, 2]"
std::string describe(const Decision& decision) {
  auto call = decision.info->name;
  for (const auto& layout : decision.pinned) call += fmt::format(" {} [{}]", str(layout->placements()), fmt::join(layout->sizes(), ", "));
  return call;
}

}  // namespace

void rethrow_failure(const Decision& decision) {
  const auto call = describe(decision);
  note_failure(decision.mesh, decision.info->name, call);
  try {
    throw;
  } catch (const Error&) {  // which says all this
    throw;
  } catch (c10::Error& error) {
    const auto& world = decision.mesh.world();
    if (world.size() > 1 && error.context().empty()) {
      error.add_context(fmt::format("in the local call of {} on {} (rank {})", call, decision.mesh.str(), world.rank()));
    }
    throw;
  }
}

void note_failure(const DeviceMesh& mesh, std::string_view function, std::string_view call) noexcept try {
  if (mesh.size() == 1) return;
  mesh.world().transport().failed_operators()->add(mesh.ranks(), function, call, dtensor::detail::text_of(std::current_exception()));
} catch (...) {
}

}  // namespace dtensor::dispatch
