#include "src/dispatch/failure.hpp"

#include "src/comm/failed_operators.hpp"

#include <dtensor/comm/transport.hpp>
#include <dtensor/world.hpp>

#include <fmt/ranges.h>

#include <exception>

namespace dtensor::dispatch {

namespace {

std::string text_of_current_exception() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace

void note_failure(const Decision& decision) noexcept try {
  auto call = decision.info->name;
  for (const auto& layout : decision.pinned) call += fmt::format(" {} [{}]", str(layout->placements()), fmt::join(layout->sizes(), ", "));
  note_failure(decision.mesh, decision.info->name, call);
} catch (...) {  // what happened goes on its way all the same
}

void note_failure(const DeviceMesh& mesh, std::string_view function, std::string_view call) noexcept try {
  auto* compares = mesh.size() > 1 ? dynamic_cast<comm::ComparesFailures*>(&mesh.world().transport()) : nullptr;
  if (compares) compares->failed_operators().add(mesh.ranks(), function, call, text_of_current_exception());
} catch (...) {
}

}  // namespace dtensor::dispatch
