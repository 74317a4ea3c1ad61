// The text of every error of the library.
#include <dtensor/error.hpp>
#include <dtensor/world.hpp>

#include "src/core/world_state.hpp"

namespace dtensor {

void throw_error(std::string_view tag, std::string_view text) {
  auto message = fmt::format("[{}] {}", tag, text);
  const World* world = detail::existing_world();
  if (world && world->size() > 1) message += fmt::format(" (rank {})", world->rank());
  throw Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(message));
}

}  // namespace dtensor
