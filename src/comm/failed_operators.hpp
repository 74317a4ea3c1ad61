// Remembers the operators that failed on this rank. A rank on which an operator failed alone has made one call less than the others; the
// ranks must notice before they mix their data. So every call carries a summary of the failed operators that all ranks of its group took
// part in. If all summaries are equal, the operators failed on all ranks, and the program goes on. Otherwise the job ends.
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
  // Notes that `op` failed on this rank for `reason`. All of `ranks` made this call, which `call` describes.
  void add(const std::vector<int>& ranks, std::string_view op, std::string_view call, std::string_view reason);

  // The number that the ranks of a group compare. It covers the failed operators that all of them took part in: their count in the upper 16
  // bits, and a hash of them in order. 0: none failed.
  uint64_t summary(const std::vector<int>& group) const;

  // Why this rank is out of step: the error of the last failed operator.
  std::string reason() const;

 private:
  // The failed operators that these ranks took part in.
  struct Failed {
    std::vector<int> ranks;  // in order
    uint64_t summary;
  };

  std::atomic<bool> any_{false};
  mutable std::mutex mutex_;
  std::vector<Failed> failed_;
  std::string reason_;
};

// Whether the rank with `summary` is out of step, and not the one with `other`. If both had as many failures, both are.
inline bool is_out_of_step(uint64_t summary, uint64_t other) { return summary != other && summary >> 48 >= other >> 48; }

}  // namespace dtensor::comm
