// Operators that failed on this rank, so that ranks which are out of step since then find out before they mix their data. Every call says
// which they were. Where all ranks of a group say the same, each of them failed there and all go on; a rank that failed alone has ended the job.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace dtensor::comm {

class FailedOperators {
 public:
  // `op`, called as `call` says on every rank alike, failed on this one for `reason`.
  void add(std::string_view op, std::string_view call, std::string_view reason);

  // What ranks compare: how many there were, in the upper 16 bits, and a hash of them all in their order. 0: none.
  uint64_t summary() const { return summary_.load(std::memory_order_relaxed); }

  // Of the last one: why this rank is out of step.
  std::string reason() const;

 private:
  std::atomic<uint64_t> summary_{0};
  mutable std::mutex mutex_;
  std::string reason_;
};

// Whether it is the rank with this summary that is out of step, rather than one with another. Both are where both had as many failures.
inline bool is_out_of_step(uint64_t summary, uint64_t other) { return summary != other && summary >> 48 >= other >> 48; }

// A transport whose ranks compare them.
class ComparesFailures {
 public:
  virtual ~ComparesFailures() = default;
  virtual FailedOperators& failed_operators() = 0;
};

}  // namespace dtensor::comm
