#include "src/launch/large_blocks.hpp"

#ifdef __linux__

#include <dtensor/base/compat.hpp>

#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <iterator>
#include <list>
#include <mutex>
#include <unordered_map>

namespace dtensor::detail {

namespace {

constexpr size_t kLarge = 8 << 20;
constexpr size_t kHugePage = 2 << 20;
// Blocks begin at different distances from a huge page: at the same one, what is copied between them would meet in the same sets of a
// cache.
constexpr size_t kStep = 4096 + 256, kSteps = 15, kRoom = 64 << 10;
static_assert(kStep * (kSteps - 1) < kRoom && kStep % 64 == 0);

size_t round_up(size_t size) { return (size + kHugePage - 1) / kHugePage * kHugePage; }

struct Block {
  char* mapped = nullptr;  // size + kRoom bytes
  void* memory = nullptr;
  size_t size = 0;
  bool offered = false;  // to the system, while it is kept
};

// Memory from the system, in huge pages; null when there is none.
Block map(size_t size) {
  static std::atomic<size_t> count{0};
  void* memory = mmap(nullptr, size + kRoom + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const size_t before = round_up(address) - address, after = kHugePage - before;
  if (before > 0) munmap(memory, before);
  auto* begin = static_cast<char*>(memory) + before;
  if (after > 0) munmap(begin + size + kRoom, after);
  madvise(begin, size, MADV_HUGEPAGE);
  return {begin, begin + count++ % kSteps * kStep, size};
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
        const Block block = remove(it);
        in_use_[block.memory] = {block.mapped, block.memory, block.size};
        return block.memory;
      }
    }
    Block block = map(size);
    if (!block.memory) {
      drop_beyond(0);
      block = map(size);
    }
    std::lock_guard lock(mutex_);
    if (block.memory) in_use_[block.memory] = block;
    return block.memory;
  }

  // Whether it was one of ours.
  bool give_back(void* memory) {
    {
      std::lock_guard lock(mutex_);
      const auto found = in_use_.find(memory);
      if (found == in_use_.end()) return false;
      const Block block = found->second;
      in_use_.erase(found);
      kept_.push_front(block);
      kept_bytes_ += block.size;
      warm_bytes_ += block.size;
      offer_beyond(memory_ / 64);
    }
    drop_beyond(memory_ / 8);
    return true;
  }

 private:
  Block remove(std::list<Block>::iterator it) {
    const Block block = *it;
    kept_bytes_ -= block.size;
    if (!block.offered) warm_bytes_ -= block.size;
    kept_.erase(it);
    return block;
  }

  // Offers to the system what has not been used for longest. Not all: who takes an offered block pays for each of its pages.
  void offer_beyond(size_t bytes) {
    for (auto it = kept_.rbegin(); warm_bytes_ > bytes && it != kept_.rend(); ++it) {
      if (it->offered) continue;
      madvise(it->mapped, it->size + kRoom, MADV_FREE);
      it->offered = true;
      warm_bytes_ -= it->size;
    }
  }

  void drop_beyond(size_t bytes) {
    std::lock_guard lock(mutex_);
    while (kept_bytes_ > bytes) {
      const Block block = remove(std::prev(kept_.end()));
      munmap(block.mapped, block.size + kRoom);
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> in_use_;
  std::list<Block> kept_;
  size_t kept_bytes_ = 0, warm_bytes_ = 0;  // warm: not offered to the system
  const size_t memory_ = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
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
