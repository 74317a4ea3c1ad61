// What a transport between processes knows of its peers besides data: how far they got, and who failed. For transports that build on one.
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

  // Why world rank `rank` will never make that call, if so; any failure in the job is a reason.
  virtual std::optional<std::string> obstacle(int rank, uint64_t stream, uint64_t sequence) = 0;

  // The job's first failure, if one is known or becomes known within `patience`.
  virtual std::optional<std::string> first_failure(Milliseconds patience) = 0;
};

}  // namespace dtensor::comm
