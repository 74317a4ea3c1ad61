// What std::exit() does in the thread of a rank.
#pragma once

namespace dtensor::detail {

// std::exit() destroys what is static, and other ranks that are threads of this process still use that (libtorch's operators, this
// library's rules and caches): they would read freed memory. So if the calling thread, which runs a rank, exits between construction and
// destruction of this, the process ends at once with its status, after a line that says so.
class ExitWatch {
 public:
  explicit ExitWatch(int rank);
  ~ExitWatch();
  ExitWatch(const ExitWatch&) = delete;
  ExitWatch& operator=(const ExitWatch&) = delete;
};

}  // namespace dtensor::detail
