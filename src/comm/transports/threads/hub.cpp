// Groups, meetings and departures of ranks that are threads.
#include "src/comm/transports/threads/hub.hpp"

#include "src/comm/describe.hpp"
#include "src/comm/spin.hpp"

namespace dtensor::comm::threads {

std::shared_ptr<Slot> Group::post(const SlotKey& key, const std::vector<int>& members, int member, Entry entry) {
  std::shared_ptr<Slot> slot;
  bool everyone = false, in_step = true;
  {
    // Ranks come at the same time as a rule, and are soon through: who sleeps meanwhile is woken later than that.
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!spin([&] { return lock.try_lock(); })) lock.lock();
    auto& place = pending_[key];
    if (!place) {
      std::vector<int> ranks;
      for (int position : members) ranks.push_back(ranks_[position]);
      place = std::make_shared<Slot>(std::move(ranks));
    }
    slot = place;
    everyone = slot->post(member, std::move(entry));
    in_step = !slot->out_of_step();
    if (everyone) {
      pending_.erase(key);
    } else {
      for (int rank : slot->absent()) {
        if (auto why = hub_.obstacle(rank)) slot->fail_if_incomplete(*why);
      }
    }
  }
  if (!in_step) [[unlikely]] hub_.leave(slot->out_of_step()->rank, slot->out_of_step()->why);
  if (everyone) slot->start();
  return slot;
}

void Group::fail_pending(int rank, const std::string& why) {
  std::lock_guard lock(mutex_);
  for (auto& [key, slot] : pending_) {
    for (int missing : slot->absent()) {
      if (rank < 0 || missing == rank) slot->fail_if_incomplete(why);
    }
  }
}

void Group::give_up(Slot& slot, Milliseconds deadline) {
  std::lock_guard lock(mutex_);
  slot.fail_if_incomplete("it " + lateness(deadline, slot.absent()));
}

std::shared_ptr<Group> Hub::group(const std::string& name, const std::vector<int>& ranks, int nth) {
  std::lock_guard lock(mutex_);
  auto& place = groups_[{name, ranks, nth}];
  if (!place) place = std::make_shared<Group>(ranks, *this);
  return place;
}

void Hub::leave(int rank, const std::string& why) {
  const std::string text = departure(rank, why);
  std::vector<std::shared_ptr<Group>> groups;
  {
    std::lock_guard lock(mutex_);
    left_[rank] = true;
    if (!why.empty() && !failure_) failure_ = text;
    for (const auto& [key, group] : groups_) groups.push_back(group);
  }
  for (const auto& group : groups) group->fail_pending(why.empty() ? rank : -1, text);
}

void Hub::offer(int64_t token, const std::shared_ptr<char>& memory) {
  std::lock_guard lock(mutex_);
  offers_[token] = memory;
}

std::shared_ptr<char> Hub::take(int64_t token) {
  std::lock_guard lock(mutex_);
  const auto found = offers_.find(token);
  return found == offers_.end() ? nullptr : found->second;
}

void Hub::withdraw(int64_t token) {
  std::lock_guard lock(mutex_);
  offers_.erase(token);
}

std::optional<std::string> Hub::obstacle(int rank) {
  std::lock_guard lock(mutex_);
  if (failure_) return failure_;
  if (left_[rank]) return departure(rank, "");
  return std::nullopt;
}

}  // namespace dtensor::comm::threads
