// The text of every error of the library.
#include <dtensor/base/error.hpp>

#include "src/base/caller.hpp"

namespace dtensor {

static detail::Caller nobody() { return {}; }
detail::Caller (*detail::caller)() = nobody;

// A text may quote errors, which name the rank too: it is named once, at the end. (Other ranks that are named stay.)
static void name_rank(std::string& message, int rank) {
  const auto name = fmt::format(" (rank {})", rank);
  for (auto at = message.find(name); at != std::string::npos; at = message.find(name, at)) message.erase(at, name.size());
  message += name;
}

void throw_error(std::string_view tag, std::string_view text) {
  auto message = fmt::format("[{}] {}", tag, text);
  const auto caller = detail::caller();
  if (caller.ranks > 1) name_rank(message, caller.rank);
  throw Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(message));
}

}  // namespace dtensor
