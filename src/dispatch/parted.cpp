#include "src/dispatch/parted.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace dtensor::dispatch {

namespace {

using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;  // weak, so that the address stays that storage's
using Group = std::vector<Memory>;                         // memories that would be one

class Table {
 public:
  void join(const c10::Storage& a, const c10::Storage& b) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.size() >= purge_at_) purge();
    auto& group = group_of(a);
    auto& other = group_of(b);
    if (group == other) return;
    const auto absorbed = other;  // `other` is one of the references that change
    group->insert(group->end(), absorbed->begin(), absorbed->end());
    for (auto& [memory, of] : groups_) {
      if (of == absorbed) of = group;
    }
    size_ = groups_.size();
  }

  bool is_parted(const c10::Storage& storage) {
    if (size_.load(std::memory_order_relaxed) == 0) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    auto* memory = storage.unsafeGetStorageImpl();
    const auto found = groups_.find(memory);
    return found != groups_.end() && std::any_of(found->second->begin(), found->second->end(), [&](const Memory& other) {
             return other._unsafe_get_target() != memory && !other.expired();
           });
  }

 private:
  std::shared_ptr<Group>& group_of(const c10::Storage& storage) {
    auto& group = groups_[storage.unsafeGetStorageImpl()];
    if (!group) group = std::make_shared<Group>(Group{storage.getWeakStorageImpl()});
    return group;
  }

  // Forgets memories that are gone.
  void purge() {
    const auto gone = [](const Memory& memory) { return memory.expired(); };
    std::vector<Memory> dead;
    for (auto& [memory, group] : groups_) {
      std::copy_if(group->begin(), group->end(), std::back_inserter(dead), gone);
      group->erase(std::remove_if(group->begin(), group->end(), gone), group->end());
    }
    for (const auto& memory : dead) groups_.erase(memory._unsafe_get_target());
    purge_at_ = std::max<size_t>(64, 2 * groups_.size());
    size_ = groups_.size();
  }

  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, std::shared_ptr<Group>> groups_;
  std::atomic<size_t> size_ = 0;
  size_t purge_at_ = 64;
};

Table& table() {
  static auto* table = new Table;  // outlives every thread
  return *table;
}

}  // namespace

void part(const at::Tensor& a, const at::Tensor& b) {
  if (a.has_storage() && b.has_storage()) table().join(a.storage(), b.storage());
}

bool is_parted(const at::Tensor& local) { return local.has_storage() && table().is_parted(local.storage()); }

}  // namespace dtensor::dispatch
