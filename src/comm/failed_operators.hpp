// Operators that failed on this rank, so that ranks which are out of step since then find out before they mix their data. Every call says
// which they were, of those that all ranks of its group took part in. Where all say the same, each of them failed there and all go on; a rank
// that failed alone has ended the job.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::comm {

class FailedOperators {
 public:
  // `op`, called as `call` says on each of `ranks` alike, failed on this one for `reason`.
  void add(const std::vector<int>& ranks, std::string_view op, std::string_view call, std::string_view reason);

  // What the ranks of a group compare: of the operators that all of them were to run, how many failed, in the upper 16 bits, and a hash of
  // them in their order. 0: none.
  uint64_t summary(const std::vector<int>& group) const;

  // Of the last one: why this rank is out of step.
  std::string reason() const;

 private:
  // Of the operators that these ranks were to run.
  struct Failed {
    std::vector<int> ranks;  // in order
    uint64_t summary;
  };

  std::atomic<bool> any_{false};
  mutable std::mutex mutex_;
  std::vector<Failed> failed_;
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
