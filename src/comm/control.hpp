// What a transport between processes knows about its peers: how far they got, and who failed. Transports on top of it use this.
#pragma once

#include <dtensor/comm/transport.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace dtensor::comm {

class Control {
 public:
  virtual ~Control() = default;

  // Notes that this rank made call `sequence` of `stream` (see Progress in rendezvous/membership.hpp).
  virtual void made(uint64_t stream, uint64_t sequence) = 0;

  // The reason if world rank `rank` will never make that call; any failure in the job is a reason.
  virtual std::optional<std::string> obstacle(int rank, uint64_t stream, uint64_t sequence) = 0;

  // The job's first failure, if one is known or becomes known within `patience`.
  virtual std::optional<std::string> first_failure(Milliseconds patience) = 0;
};

}  // namespace dtensor::comm
