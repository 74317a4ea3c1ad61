// Counts the memory that tensors without values would take, by an allocator of the meta device.
#include <dtensor/base/compat.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/mesh/world.hpp>

#include <c10/core/Allocator.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace dtensor {

namespace {

// Of one rank. Tensors may outlive their world.
struct Counter {
  void add(int64_t bytes) {
    const std::lock_guard lock(mutex);
    memory.peak = std::max(memory.peak, memory.now += bytes);
  }
  std::mutex mutex;
  MetaMemory memory;
};

struct OwnCounter {
  std::shared_ptr<Counter> counter = std::make_shared<Counter>();
};

const std::shared_ptr<Counter>& own_counter() { return World::current().local<OwnCounter>().counter; }

class Counting final : public c10::Allocator {
 public:
#if DTENSOR_TORCH_AT_LEAST(2, 3)
  c10::DataPtr allocate(size_t bytes) override { return counted(bytes); }
  void copy_data(void*, const void*, std::size_t) const override {}
#else
  c10::DataPtr allocate(size_t bytes) const override { return counted(bytes); }
#endif

  static Counting& instance() {
    static auto* counting = [] {
      auto* made = new Counting;  // outlives every tensor
      c10::SetAllocator(c10::DeviceType::Meta, made, /*priority=*/1);
      return made;
    }();
    return *counting;
  }

 private:
  // The pointer is null; its context is how many bytes it would be, and who counts them.
  struct Counted {
    std::shared_ptr<Counter> counter;
    int64_t bytes;
  };
  c10::DataPtr counted(size_t bytes) const {
    auto* made = new Counted{own_counter(), static_cast<int64_t>(bytes)};
    made->counter->add(made->bytes);
    const auto forget = [](void* context) {
      const std::unique_ptr<Counted> counted(static_cast<Counted*>(context));
      counted->counter->add(-counted->bytes);
    };
    return {nullptr, made, forget, c10::Device(c10::DeviceType::Meta)};
  }
};

}  // namespace

MetaMemory meta_memory() {
  Counting::instance();
  auto& counter = *own_counter();
  const std::lock_guard lock(counter.mutex);
  return counter.memory;
}

void reset_meta_memory_peak() {
  auto& counter = *own_counter();
  const std::lock_guard lock(counter.mutex);
  counter.memory.peak = counter.memory.now;
}

}  // namespace dtensor
