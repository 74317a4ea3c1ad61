// What the ranks of a job tell each other to find those that share their host's memory.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include <sys/types.h>

namespace dtensor::comm::shared_memory {

constexpr size_t kTokenBytes = 48;  // with the zero at its end

// Where a rank is, and the file that it offers. An empty host: none.
struct Card {
  std::string host;
  pid_t process = 0;
  int fd = -1;
  uint64_t header = 0;  // the address of the file's header in that process
  std::string token;

  std::string str() const { return host.empty() ? "" : fmt::format("{} {} {} {} {}", host, process, fd, header, token); }
  // None, where the text is no card.
  static Card parse(const std::string& text) {
    Card card;
    std::istringstream words(text);
    const bool all = static_cast<bool>(words >> card.host >> card.process >> card.fd >> card.header >> card.token);
    const bool fits = all && words.eof() && card.process > 0 && card.fd >= 0 && card.token.size() < kTokenBytes;
    return fits ? card : Card();
  }
};

}  // namespace dtensor::comm::shared_memory
