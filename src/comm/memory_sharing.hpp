// How the ranks of a group come to memory that all of them address. A transport whose ranks can implements this.
#pragma once

#include <dtensor/comm/transport.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace dtensor::comm {

// By what the others find memory that a rank offers.
struct MemoryTicket {
  int64_t place = 0, token = 0;
};

class MemorySharing {
 public:
  virtual ~MemorySharing() = default;

  struct Offer {
    std::shared_ptr<char> memory;
    MemoryTicket ticket;
    std::shared_ptr<void> open;  // until this goes, others may take it
  };
  // Zeros, but for the first eight bytes, which are the transport's; at least these. Throws std::system_error where there is no room.
  virtual Offer offer(int64_t bytes) = 0;
  // What the member `owner` offers. Throws std::system_error.
  virtual std::shared_ptr<char> take(int owner, const MemoryTicket& ticket, int64_t bytes) = 0;

  // Why the member will do nothing any more, if so: the job's first failure, or that it has left.
  virtual std::optional<std::string> obstacle(int member) = 0;
  // The longest that a wait may take.
  virtual Milliseconds deadline() const = 0;
};

// Throws std::system_error where this machine has less memory left: asking for it might end the process.
void check_memory_is_left(int64_t bytes);
// Memory of this process, zeros. Throws std::system_error.
std::shared_ptr<char> zeroed_memory(int64_t bytes);
// Another one for each call in this process.
int64_t memory_token();

}  // namespace dtensor::comm
