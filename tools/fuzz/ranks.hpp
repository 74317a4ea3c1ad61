// Ranks that live for many programs: threads of one process, started again after a failure.
#pragma once

#include <dtensor/mesh/world.hpp>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace dtensor::fuzz {

class Ranks {
 public:
  explicit Ranks(comm::Milliseconds deadline) : deadline_(deadline) {}
  ~Ranks() { stop(); }

  static constexpr int kMost = 8;

  // Runs `body` on ranks 0 to count-1 and waits for them. A body that throws leaves the world, which is then made anew.
  void run(int count, const std::function<void(World&)>& body);

  // Ends the world; the next run makes another.
  void stop();

 private:
  void start();
  void serve(World& world);

  comm::Milliseconds deadline_;
  std::thread host_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(World&)>* body_ = nullptr;
  int count_ = 0, left_ = 0;
  uint64_t round_ = 0;
  bool stopping_ = false, failed_ = false;
};

}  // namespace dtensor::fuzz
