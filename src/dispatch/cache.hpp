// The cache of decisions by call key: a bounded hash table with open addressing, which compares keys exactly.
#pragma once

#include "src/base/fast_thread_local.hpp"
#include "src/dispatch/decision.hpp"
#include "src/dispatch/key.hpp"

#include <memory>
#include <vector>

namespace dtensor::dispatch {

class DecisionCache {
 public:
  static constexpr size_t kCapacity = 1 << 14;  // slots; emptied when half full, so changing shapes cannot leak

  // Null if the key is unknown. The pointer is valid until the next insert; copy it before running anything that may dispatch again.
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

  static DecisionCache& of_this_thread() { return current_ ? *current_ : make(); }

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
    if (a.size() != b.size()) return false;
    uint64_t difference = 0;
    for (size_t i = 0; i < b.size(); ++i) difference |= a[i] ^ b[i];
    return difference == 0;
  }

  static DecisionCache& make();
  static DTENSOR_FAST_THREAD_LOCAL DecisionCache* current_;

  std::vector<Slot> slots_ = std::vector<Slot>(kCapacity);
  size_t count_ = 0;
};

}  // namespace dtensor::dispatch
