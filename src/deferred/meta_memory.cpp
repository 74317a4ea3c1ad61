// Counts the memory that tensors without values would take, by an allocator of the meta device.
#include <dtensor/base/compat.hpp>
#include <dtensor/deferred/deferred_init.hpp>

#include <c10/core/Allocator.h>

#include <algorithm>
#include <mutex>

namespace dtensor {

namespace {

class Counting final : public c10::Allocator {
 public:
#if DTENSOR_TORCH_AT_LEAST(2, 3)
  c10::DataPtr allocate(size_t bytes) override { return counted(bytes); }
  void copy_data(void*, const void*, std::size_t) const override {}
#else
  c10::DataPtr allocate(size_t bytes) const override { return counted(bytes); }
#endif

  MetaMemory memory() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return memory_;
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_.peak = memory_.now;
  }

  static Counting& instance() {
    static auto* counting = [] {
      auto* made = new Counting;  // outlives every tensor
      c10::SetAllocator(c10::DeviceType::Meta, made, /*priority=*/1);
      return made;
    }();
    return *counting;
  }

 private:
  // The context of the pointer, which is null, is how many bytes it would be.
  c10::DataPtr counted(size_t bytes) const {
    add(static_cast<int64_t>(bytes));
    const auto forget = [](void* context) { instance().add(-static_cast<int64_t>(reinterpret_cast<uintptr_t>(context))); };
    return {nullptr, reinterpret_cast<void*>(bytes), forget, c10::Device(c10::DeviceType::Meta)};
  }
  void add(int64_t bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_.peak = std::max(memory_.peak, memory_.now += bytes);
  }

  mutable std::mutex mutex_;
  mutable MetaMemory memory_;
};

}  // namespace

MetaMemory meta_memory() { return Counting::instance().memory(); }
void reset_meta_memory_peak() { Counting::instance().reset_peak(); }

}  // namespace dtensor
