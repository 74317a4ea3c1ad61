// What threads draw from that a rank's program starts for itself, as the workers of a data loader: of the process's generator nobody could
// say whose draws come when.
#pragma once

#include <ATen/core/Generator.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace dtensor::rng {

// A stream for threads that are no ranks. They draw from it where they give no generator, and find it behind ATen's default one.
class LentStream {
 public:
  // Where it is `shared` the threads draw from `generator` itself. Else from a copy, which is taken at the first draw or by start().
  LentStream(at::Generator generator, bool shared);

  void start();
  bool has_drawn() const { return drawn_.load(std::memory_order_acquire); }

  at::Generator generator();  // the one that threads draw from; starts
  at::Generator draw();       // the same, and has_drawn() from now on

 private:
  at::Generator from_, generator_;
  std::once_flag started_;
  std::atomic<bool> drawn_{false};
};

// Lends it to these threads until the handle goes.
std::shared_ptr<void> lend(const std::shared_ptr<LentStream>& stream, const std::vector<std::thread>& to);

// What is lent to the calling thread; null in most.
LentStream* lent_to_this_thread();

// Moves a generator so far ahead that it never meets a copy of itself that goes on from here.
void move_far(at::Generator& generator);

}  // namespace dtensor::rng
