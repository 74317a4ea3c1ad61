#include "src/comm/failed_operators.hpp"

#include "src/comm/describe.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace dtensor::comm {

static constexpr uint64_t kMost = 0xffff, kHash = (uint64_t{1} << 48) - 1;

void FailedOperators::add(const std::vector<int>& ranks, std::string_view op, std::string_view call, std::string_view reason) {
  auto ordered = ranks;
  std::ranges::sort(ordered);
  std::lock_guard lock(mutex_);
  const auto same = std::ranges::find_if(failed_, [&](const Failed& failed) { return failed.ranks == ordered; });
  auto& failed = same == failed_.end() ? failed_.emplace_back(Failed{std::move(ordered), 0}) : *same;
  const uint64_t count = std::min((failed.summary >> 48) + 1, kMost);
  failed.summary = count << 48 | (hash_text(call, failed.summary) & kHash);
  any_.store(true, std::memory_order_relaxed);
  reason_ = fmt::format("{} failed on this rank and not alike on all, so that the ranks are out of step: {}", op, reason);
}

uint64_t FailedOperators::summary(const std::vector<int>& group) const {
  if (!any_.load(std::memory_order_relaxed)) [[likely]] return 0;
  std::lock_guard lock(mutex_);
  uint64_t count = 0, hash = 0;
  for (const auto& failed : failed_) {
    const auto took_part = [&](int rank) { return std::ranges::binary_search(failed.ranks, rank); };
    if (!std::ranges::all_of(group, took_part)) continue;
    count += failed.summary >> 48;
    hash += failed.summary & kHash;  // a sum: ranks may have met their meshes in other orders
  }
  return std::min(count, kMost) << 48 | (hash & kHash);
}

std::string FailedOperators::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

}  // namespace dtensor::comm
