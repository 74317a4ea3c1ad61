#include "src/dispatch/copied_views.hpp"

#include <dtensor/mesh/alias.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <ranges>
#include <unordered_map>

namespace dtensor::dispatch {

namespace {

// A tensor without a claim on its memory.
struct View {
  View(DTensorImpl& tensor, bool known, Sign of)
      : memory(tensor.local().storage().getWeakStorageImpl()),
        keys(dtensor::detail::keys_of_memory(tensor.local())),
        sizes(tensor.local().sizes()),
        strides(tensor.local().strides()),
        local_offset(tensor.local().storage_offset()),
        layout(tensor.layout()),
        offset(tensor.storage_offset()),
        place_known(known),
        sign(of) {}

  const c10::StorageImpl* storage() const { return memory._unsafe_get_target(); }

  c10::weak_intrusive_ptr<c10::StorageImpl> memory;  // weak, so that the address stays that storage's
  c10::DispatchKeySet keys;
  Sizes sizes, strides;
  int64_t local_offset;
  LayoutPtr layout;
  int64_t offset;
  bool place_known;
  Sign sign;
};
using Group = std::vector<View>;  // whose memories would be one

// Whether a write to `storage` has to be carried over to the view: it has other memory, or elements apart that would be one.
bool needs_copies(const View& view, const c10::StorageImpl* storage) {
  if (view.memory.expired()) return false;
  return view.storage() != storage || overlaps(*view.layout);
}

class Table {
 public:
  void join(const View& a, View b) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (groups_.size() >= purge_at_) purge();
    b.sign = b.sign * sign_of_known(a.storage());
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

  bool has_copied_views(const c10::StorageImpl* storage) {
    if (is_empty()) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(storage);
    return found != groups_.end() && std::ranges::any_of(*found->second, [&](const View& view) { return needs_copies(view, storage); });
  }

  bool is_empty() const { return size_.load(std::memory_order_relaxed) == 0; }

  Sign sign_of(const c10::StorageImpl* storage) {
    std::lock_guard<std::mutex> lock(mutex_);
    return sign_of_known(storage);
  }

  std::vector<Held> copies_of(const c10::StorageImpl* storage) {
    std::vector<Held> others;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(storage);
    if (found == groups_.end()) return others;
    for (const auto& view : *found->second) {
      const c10::Storage memory(needs_copies(view, storage) ? view.memory.lock() : c10::intrusive_ptr<c10::StorageImpl>());
      if (!memory) continue;
      const auto dtype = c10::scalarTypeToTypeMeta(view.layout->dtype());
      others.push_back({dtensor::detail::alias(memory, view.keys, dtype, view.sizes, view.strides, view.local_offset), view.layout,
                        view.offset, view.place_known, view.sign});
    }
    return others;
  }

 private:
  // All of a memory is of one sign.
  Sign sign_of_known(const c10::StorageImpl* storage) {
    const auto found = groups_.find(storage);
    if (found == groups_.end()) return {};
    for (const auto& view : *found->second) {
      if (view.storage() == storage) return view.sign;
    }
    return {};
  }

  // The group of the tensor's memory, in which it is known to be.
  std::shared_ptr<Group>& group_of(const View& view) {
    auto& group = groups_[view.storage()];
    if (!group) group = std::make_shared<Group>();
    const bool known = std::any_of(group->begin(), group->end(), [&](const View& other) {
      return other.storage() == view.storage() && other.layout == view.layout && other.offset == view.offset;
    });
    if (!known) group->push_back(view);
    return group;
  }

  // Forgets memories that are gone.
  void purge() {
    std::vector<const c10::StorageImpl*> dead;
    for (auto& [memory, group] : groups_) {
      const auto gone = std::stable_partition(group->begin(), group->end(), [](const View& view) { return !view.memory.expired(); });
      std::transform(gone, group->end(), std::back_inserter(dead), [](const View& view) { return view.storage(); });
      group->erase(gone, group->end());
    }
    for (const auto* memory : dead) groups_.erase(memory);
    purge_at_ = std::max<size_t>(64, 2 * groups_.size());
    size_ = groups_.size();
  }

  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Group>> groups_;
  std::atomic<size_t> size_ = 0;
  size_t purge_at_ = 64;
};

Table& table() {
  static auto* table = new Table;  // outlives every thread
  return *table;
}

const c10::StorageImpl* storage_of(const at::Tensor& local) { return local.storage().unsafeGetStorageImpl(); }

}  // namespace

bool overlaps(const Layout& layout) {
  int64_t extent = 1;
  const auto order = memory_order(layout.strides());
  for (const auto d : order | std::views::reverse) {
    if (layout.sizes()[d] <= 1) continue;
    if (layout.strides()[d] < extent) return true;
    extent += layout.strides()[d] * (layout.sizes()[d] - 1);
  }
  return false;
}

void join_copies(DTensorImpl& base, DTensorImpl& view, bool place_known, Sign sign) {
  if (!base.local().has_storage() || !view.local().has_storage()) return;
  table().join({base, true, sign_of(base.local())}, {view, place_known, sign});
}

Sign sign_of(const at::Tensor& local) { return local.has_storage() ? table().sign_of(storage_of(local)) : Sign(); }

bool any_copied_views() { return !table().is_empty(); }

bool has_copied_views(const at::Tensor& local) { return local.has_storage() && table().has_copied_views(storage_of(local)); }

std::vector<Held> copies_of(const at::Tensor& local) {
  return local.has_storage() ? table().copies_of(storage_of(local)) : std::vector<Held>();
}

}  // namespace dtensor::dispatch
