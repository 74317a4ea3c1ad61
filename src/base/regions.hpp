// What a guard (Spmd, DeferredInit, RankLocalRandom, ...) sets in its thread as long as it lives. Guards may be held by pointers: they
// end in any order, and on any thread.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace dtensor::detail {

class Region {
 public:
  virtual ~Region() = default;

  // Once, by any thread. One that is not the innermost is taken out from among the others. A thread whose region another thread has ended
  // goes on in it, and keeps it alive, until it next begins or ends a region itself.
  void end() noexcept;

 protected:
  // False when the calling thread is ending: nothing may be set any more.
  static bool open(const std::shared_ptr<Region>& region);
  static void close_ended() noexcept;

 private:
  friend class OpenRegions;
  virtual void leave() noexcept = 0;                 // sets what was set outside
  virtual bool hand_to(Region& inner) noexcept = 0;  // leaves that to `inner`; false where it sets other things

  std::atomic<bool> ended_{false};
};

// A kind of region, by what it sets: Setting::now() is what the calling thread has, apply() sets it, and does not throw. It may point into
// what the regions around it keep.
template <class Setting>
class RegionOf final : public Region {
 public:
  // `keep` lives as long as the region.
  static std::shared_ptr<Region> begin(Setting inside, std::shared_ptr<const void> keep = {}) {
    close_ended();
    auto region = std::make_shared<RegionOf>(Setting::now(), std::move(keep));
    if (open(region)) inside.apply();
    return region;
  }

  RegionOf(Setting outside, std::shared_ptr<const void> keep) : outside_(std::move(outside)), keep_(std::move(keep)) {}

 private:
  void leave() noexcept override { outside_.apply(); }
  bool hand_to(Region& inner) noexcept override {
    auto* same = dynamic_cast<RegionOf*>(&inner);
    if (same) same->outside_ = outside_;
    return same != nullptr;
  }

  Setting outside_;
  std::shared_ptr<const void> keep_;
};

}  // namespace dtensor::detail
