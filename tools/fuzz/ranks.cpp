#include "ranks.hpp"

namespace dtensor::fuzz {

void Ranks::start() {
  stopping_ = failed_ = false;
  round_ = 0;
  host_ = std::thread([this] {
    launch(LaunchOptions{.ranks = kMost, .transport = "threads", .deadline = deadline_}, [this](World& world) { serve(world); });
  });
}

void Ranks::stop() {
  if (!host_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  host_.join();
}

void Ranks::run(int count, const std::function<void(World&)>& body) {
  if (!host_.joinable()) start();
  {
    std::unique_lock lock(mutex_);
    body_ = &body;
    count_ = left_ = count;
    ++round_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return left_ == 0; });
  }
  if (failed_) stop();
}

void Ranks::serve(World& world) {
  uint64_t done = 0;
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopping_ || round_ != done; });
    if (stopping_) return;
    done = round_;
    if (world.rank() >= count_) continue;
    const auto& body = *body_;
    lock.unlock();
    bool failed = false;
    try {
      body(world);
    } catch (const std::exception& error) {
      world.transport().leave(error.what());
      failed = true;
    }
    lock.lock();
    failed_ |= failed;
    if (--left_ == 0) changed_.notify_all();
  }
}

}  // namespace dtensor::fuzz
