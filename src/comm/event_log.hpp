// What the copies of a rank's Events share.
#pragma once

#include <dtensor/comm/event.hpp>

#include "src/comm/flight/ring.hpp"

#include <memory>
#include <mutex>

namespace dtensor::comm {

struct EventLog {
  std::shared_ptr<flight::Ring> ring = std::make_shared<flight::Ring>();
  std::recursive_mutex mutex;     // of what follows
  Observer* innermost = nullptr;
};

// How many observers there are, of all ranks, that see operators. Where there is none, an operator that communicates nothing costs no more
// than to look.
extern std::atomic<int> observers_of_operators;

}  // namespace dtensor::comm
