#include "src/launch/large_blocks.hpp"

#ifdef __linux__

#include <dtensor/compat.hpp>

#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <list>
#include <mutex>
#include <unordered_map>

namespace dtensor::detail {

namespace {

constexpr size_t kLarge = 32 << 20;  // glibc maps these, and no setting makes it stop
constexpr size_t kHugePage = 2 << 20;

size_t round_up(size_t size) { return (size + kHugePage - 1) / kHugePage * kHugePage; }

// Memory from the system that begins at a huge page; null when there is none.
void* map(size_t size) {
  void* memory = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const size_t before = round_up(address) - address, after = kHugePage - before;
  if (before > 0) munmap(memory, before);
  auto* begin = static_cast<char*>(memory) + before;
  if (after > 0) munmap(begin + size, after);
  madvise(begin, size, MADV_HUGEPAGE);
  return begin;
}

// Blocks in use by address, and those that are kept, the latest first.
class Blocks {
 public:
  void* take(size_t wanted) {
    const size_t size = round_up(wanted);
    {
      std::lock_guard lock(mutex_);
      for (auto it = kept_.begin(); it != kept_.end(); ++it) {
        if (it->size < size || it->size > size + size / 8) continue;
        auto* memory = it->memory;
        kept_bytes_ -= it->size;
        in_use_[memory] = it->size;
        kept_.erase(it);
        return memory;
      }
    }
    auto* memory = map(size);
    if (!memory) {
      drop_beyond(0);
      memory = map(size);
    }
    std::lock_guard lock(mutex_);
    if (memory) in_use_[memory] = size;
    return memory;
  }

  // Whether it was one of ours.
  bool give_back(void* memory) {
    {
      std::lock_guard lock(mutex_);
      const auto found = in_use_.find(memory);
      if (found == in_use_.end()) return false;
      const size_t size = found->second;
      in_use_.erase(found);
      madvise(memory, size, MADV_FREE);
      kept_.push_front({memory, size});
      kept_bytes_ += size;
    }
    drop_beyond(most_);
    return true;
  }

 private:
  struct Block {
    void* memory;
    size_t size;
  };

  void drop_beyond(size_t bytes) {
    std::lock_guard lock(mutex_);
    while (kept_bytes_ > bytes) {
      munmap(kept_.back().memory, kept_.back().size);
      kept_bytes_ -= kept_.back().size;
      kept_.pop_back();
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> in_use_;
  std::list<Block> kept_;
  size_t kept_bytes_ = 0;
  const size_t most_ = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)) / 8;
};

// Lives as long as the last tensor.
Blocks& blocks() {
  static auto* all = new Blocks;
  return *all;
}

c10::Allocator& smaller_blocks() { return *c10::GetDefaultCPUAllocator(); }

void free_block(void* memory) {
  if (!blocks().give_back(memory)) smaller_blocks().raw_deleter()(memory);
}

class LargeBlockAllocator final : public c10::Allocator {
 public:
#if DTENSOR_TORCH_AT_LEAST(2, 2)
  c10::DataPtr allocate(size_t size) override {
#else
  c10::DataPtr allocate(size_t size) const override {
#endif
    void* memory = size < kLarge ? nullptr : blocks().take(size);
    if (!memory) return smaller_blocks().allocate(size);
    return {memory, memory, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
#if DTENSOR_TORCH_AT_LEAST(2, 2)
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
#endif
};

}  // namespace

void keep_large_blocks() {
  static const bool once = [] {
    if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) c10::SetCPUAllocator(new LargeBlockAllocator);
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace dtensor::detail

#else

namespace dtensor::detail {
void keep_large_blocks() {}
}  // namespace dtensor::detail

#endif
