// Decisions by call key: open addressing, exact comparison, bounded.
#pragma once

#include "src/dispatch/decision.hpp"
#include "src/dispatch/key.hpp"

#include <memory>
#include <vector>

namespace dtensor::dispatch {

class DecisionCache {
 public:
  static constexpr size_t kCapacity = 1 << 14;  // slots; emptied when half full, so changing shapes cannot leak

  // Null when unknown. The pointer holds until the next insert; keep a copy of it to run what may dispatch again.
  const std::shared_ptr<const Decision>* find(const Key& key, uint64_t hash) const {
    for (size_t i = hash & (kCapacity - 1);; i = (i + 1) & (kCapacity - 1)) {
      const auto& slot = slots_[i];
      if (!slot.entry) return nullptr;
      if (slot.hash == hash && same(slot.entry->words, key.words())) return &slot.entry->decision;
    }
  }

  void insert(const Key& key, uint64_t hash, std::shared_ptr<const Decision> decision) {
    if (2 * ++count_ > kCapacity) clear(), count_ = 1;
    size_t i = hash & (kCapacity - 1);
    while (slots_[i].entry) i = (i + 1) & (kCapacity - 1);
    slots_[i].hash = hash;
    slots_[i].entry = std::make_unique<Entry>(Entry{{key.words().begin(), key.words().end()}, std::move(decision)});
  }

  void clear() {
    std::vector<Slot>(kCapacity).swap(slots_);
    count_ = 0;
  }

  static DecisionCache& of_this_thread() {
    static thread_local DecisionCache cache;
    return cache;
  }

 private:
  struct Entry {
    std::vector<uint64_t> words;
    std::shared_ptr<const Decision> decision;
  };
  struct Slot {
    uint64_t hash = 0;
    std::unique_ptr<Entry> entry;
  };
  static bool same(const std::vector<uint64_t>& a, c10::ArrayRef<uint64_t> b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(uint64_t)) == 0;
  }

  std::vector<Slot> slots_ = std::vector<Slot>(kCapacity);
  size_t count_ = 0;
};

}  // namespace dtensor::dispatch
