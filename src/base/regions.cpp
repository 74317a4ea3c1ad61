#include "src/base/regions.hpp"

#include <algorithm>
#include <vector>

namespace dtensor::detail {

// The regions that a thread is in, outermost first.
class OpenRegions {
 public:
  OpenRegions() { current_ = this; }
  ~OpenRegions() {
    for (const auto& region : open_) region->ended_ = true;
    close_ended();  // what the thread still destroys must not meet what regions kept
    current_ = nullptr, over_ = true;
  }

  static OpenRegions* of_this_thread() {
    if (current_ || over_) return current_;
    static thread_local OpenRegions regions;
    return current_;
  }

  void add(std::shared_ptr<Region> region) { open_.push_back(std::move(region)); }

  void close_ended() noexcept {
    const auto has_ended = [](const auto& region) { return region->ended_.load(std::memory_order_acquire); };
    for (auto last = std::find_if(open_.rbegin(), open_.rend(), has_ended); last != open_.rend();
         last = std::find_if(open_.rbegin(), open_.rend(), has_ended)) {
      const auto region = std::move(*last);
      const auto inner = open_.erase(std::prev(last.base()));
      if (std::none_of(inner, open_.end(), [&](const auto& other) { return region->hand_to(*other); })) region->leave();
    }
  }

 private:
  static thread_local OpenRegions* current_;
  static thread_local bool over_;
  std::vector<std::shared_ptr<Region>> open_;
};

thread_local OpenRegions* OpenRegions::current_ = nullptr;
thread_local bool OpenRegions::over_ = false;

bool Region::open(const std::shared_ptr<Region>& region) {
  auto* regions = OpenRegions::of_this_thread();
  if (regions) regions->add(region);
  return regions;
}

void Region::close_ended() noexcept {
  if (auto* regions = OpenRegions::of_this_thread()) regions->close_ended();
}

void Region::end() noexcept {
  ended_.store(true, std::memory_order_release);
  close_ended();
}

}  // namespace dtensor::detail
