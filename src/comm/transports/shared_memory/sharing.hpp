// Memory for SymmetricMemory: an anonymous file of its own, which is gone when the last rank has let go of it.
#pragma once

#include "src/comm/memory_sharing.hpp"
#include "src/comm/transports/gloo/link.hpp"
#include "src/comm/transports/shared_memory/arena.hpp"

namespace dtensor::comm::shared_memory {

class FileSharing final : public MemorySharing {
 public:
  // `ranks` of the group, who all share the arena's memory.
  FileSharing(std::shared_ptr<gloo::Link> link, const std::shared_ptr<Arena>& arena, std::vector<int> ranks, const Transport& transport);

  Offer offer(int64_t bytes) override;
  std::shared_ptr<char> take(int owner, const MemoryTicket& ticket, int64_t bytes) override;
  std::optional<std::string> obstacle(int member) override;
  Milliseconds deadline() const override { return transport_.deadline(); }

 private:
  const std::shared_ptr<gloo::Link> link_;
  const std::vector<int> ranks_;
  const Transport& transport_;
  std::vector<pid_t> processes_;  // of the ranks
};

}  // namespace dtensor::comm::shared_memory
