#include "src/comm/failed_operators.hpp"

#include "src/comm/describe.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace dtensor::comm {

void FailedOperators::add(std::string_view op, std::string_view call, std::string_view reason) {
  constexpr uint64_t kMost = 0xffff, kHash = (uint64_t{1} << 48) - 1;
  std::lock_guard lock(mutex_);
  const uint64_t before = summary_.load(std::memory_order_relaxed);
  const uint64_t count = std::min((before >> 48) + 1, kMost);
  summary_.store(count << 48 | (hash_text(call, before) & kHash), std::memory_order_relaxed);
  reason_ = fmt::format("{} failed on this rank and not alike on all, so that the ranks are out of step: {}", op, reason);
}

std::string FailedOperators::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

}  // namespace dtensor::comm
