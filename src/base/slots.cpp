#include <dtensor/base/error.hpp>
#include <dtensor/base/slots.hpp>

namespace dtensor {

size_t Slots::new_index() {
  static std::atomic<size_t> count{0};
  const auto index = count++;
  require(index < kMost, "Slots", "more than {} types are kept for a rank; hint: keep them in one struct", kMost);
  return index;
}

void* Slots::make(size_t index, std::shared_ptr<void> (*maker)()) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (auto* held = held_[index].load(std::memory_order_relaxed)) return held;
  owned_.push_back(maker());
  held_[index].store(owned_.back().get(), std::memory_order_release);
  return owned_.back().get();
}

}  // namespace dtensor
