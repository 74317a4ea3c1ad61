#include <dtensor/base/error.hpp>
#include <dtensor/comm/transport_kind.hpp>

#include <fmt/ranges.h>

#include <map>

namespace dtensor::comm {

namespace {

std::map<std::string, TransportKind, std::less<>>& kinds() {
  static std::map<std::string, TransportKind, std::less<>> all;
  return all;
}

}  // namespace

RegisterTransport::RegisterTransport(TransportKind kind) {
  auto& known = kinds()[kind.name];
  if (known.name.empty() || kind.missing.empty()) known = std::move(kind);
}

const TransportKind& transport_kind(std::string_view name) {
  const auto found = kinds().find(name);
  if (found == kinds().end()) {
    std::vector<std::string> names;
    for (const auto& [known, kind] : kinds()) names.push_back(known);
    fail("launch", "unknown transport; got '{}'; expected one of {}", name, fmt::join(names, ", "));
  }
  require(found->second.missing.empty(), "launch", "this build has no transport '{}'; hint: {}", name, found->second.missing);
  return found->second;
}

std::vector<const TransportKind*> transport_kinds() {
  std::vector<const TransportKind*> all;
  for (const auto& [name, kind] : kinds()) all.push_back(&kind);
  return all;
}

}  // namespace dtensor::comm
