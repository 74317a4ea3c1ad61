// What layers keep for one rank, without the lowest one knowing them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// One object of each type that is asked for, made on first use and destroyed in the opposite order. Threads may ask at once.
class Slots {
 public:
  Slots() = default;
  ~Slots() {
    while (!owned_.empty()) owned_.pop_back();
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  template <class T>
  T& get() {
    static const size_t index = new_index();
    if (auto* held = held_[index].load(std::memory_order_acquire)) [[likely]] return *static_cast<T*>(held);
    return *static_cast<T*>(make(index, [] { return std::shared_ptr<void>(std::make_shared<T>()); }));
  }

 private:
  static constexpr size_t kMost = 128;  // types in a program

  static size_t new_index();  // throws past kMost
  void* make(size_t index, std::shared_ptr<void> (*maker)());

  std::array<std::atomic<void*>, kMost> held_{};
  std::recursive_mutex mutex_;
  std::vector<std::shared_ptr<void>> owned_;
};

}  // namespace dtensor

#pragma GCC visibility pop
