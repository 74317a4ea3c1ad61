#include "src/comm/flight/errors.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

namespace dtensor::comm::flight {

namespace {

// The first line, without the name of the rank, which the report says.
std::string error_of(const Witness& witness) {
  auto error = witness.recording->error.substr(0, witness.recording->error.find('\n'));
  const auto name = fmt::format(" (rank {})", witness.rank);
  if (error.ends_with(name)) error.resize(error.size() - name.size());
  return error;
}

}  // namespace

Errors::Errors(const std::vector<Witness>& witnesses) {
  for (const auto& witness : witnesses) {
    if (!witness.recording || witness.recording->state != State::failed) continue;
    failed_[witness.rank] = &witness;
    if (witness.told) said_.emplace(error_of(witness), witness.rank);
  }
}

std::string Errors::why(const Witness& witness) {
  if (witness.told) return " first";
  auto error = error_of(witness);
  const auto [said, is_new] = said_.emplace(error, witness.rank);
  if (!is_new) return said->second == witness.rank ? "" : fmt::format(" as rank {} did", said->second);
  // "... cannot complete: rank 1 failed: out of cheese", where rank 1 says what it is out of.
  constexpr std::string_view kFailed = " failed", kRank = "rank ";
  const auto mark = error.find(kFailed), number = mark == error.npos ? mark : error.rfind(kRank, mark);
  if (number == error.npos) return ": " + error;
  const auto cause = failed_.find(static_cast<int>(std::strtol(error.c_str() + number + kRank.size(), nullptr, 10)));
  if (cause == failed_.end() || cause->second == &witness) return ": " + error;
  const auto quoted = ": " + error_of(*cause->second);
  if (error.compare(mark + kFailed.size(), quoted.size(), quoted) == 0) error.erase(mark + kFailed.size(), quoted.size());
  return ": " + error;
}

}  // namespace dtensor::comm::flight
