// The random stream of threads that a rank's program starts itself, such as the workers of a data loader. If these drew from the process's
// generator, nobody could say whose draws come when.
#pragma once

#include <ATen/core/Generator.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rng {

// A stream for threads that are not ranks. A thread that was lent it draws from it wherever it gives no generator, and finds it behind
// ATen's default generator.
class LentStream {
 public:
  // If `shared`, the threads draw from `generator` itself. Else they draw from a copy, which is taken at the first draw or by start().
  LentStream(at::Generator generator, bool shared);

  void start();
  bool has_drawn() const { return drawn_.load(std::memory_order_acquire); }

  at::Generator generator();  // the generator that threads draw from; starts the stream
  at::Generator draw();       // the same; from now on has_drawn() is true

 private:
  at::Generator from_, generator_;
  std::once_flag started_;
  std::atomic<bool> drawn_{false};
};

// Lends the stream to these threads, until the returned handle is gone.
std::shared_ptr<void> lend(const std::shared_ptr<LentStream>& stream, const std::vector<std::thread>& to);

// The stream that the calling thread was lent; null for most threads.
LentStream* lent_to_this_thread();

// Moves a generator so far ahead that it never meets a copy of itself that goes on from here.
void move_far(at::Generator& generator);

}  // namespace dtensor::rng

#pragma GCC visibility pop
