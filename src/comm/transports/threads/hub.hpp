// The state that ranks of one process share: groups, their collectives under way, and which ranks have left.
#pragma once

#include "src/comm/transports/threads/slot.hpp"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace dtensor::comm::threads {

class Hub;

// Identifies a meeting: a collective by its number (peers -1), a message by its ends, tag and number.
struct SlotKey {
  int from = -1, to = -1, tag = 0;
  uint64_t sequence = 0;
  auto operator<=>(const SlotKey&) const = default;
};

// The shared half of a communicator.
class Group {
 public:
  Group(std::vector<int> ranks, Hub& hub) : ranks_(std::move(ranks)), hub_(hub) {}

  // Meets the others in slot `key`, whose members are the group's positions `members`; this rank is members[member].
  std::shared_ptr<Slot> post(const SlotKey& key, const std::vector<int>& members, int member, Entry entry);

  // Fails every incomplete meeting that `rank` has not come to, or all of them when `rank` is -1.
  void fail_pending(int rank, const std::string& why);

  // A rank's wait has reached its deadline: unless all have come the meeting fails for everyone, since what that rank brought may be
  // overwritten from now on.
  void give_up(Slot& slot, Milliseconds deadline);

 private:
  const std::vector<int> ranks_;
  Hub& hub_;
  std::mutex mutex_;
  std::map<SlotKey, std::shared_ptr<Slot>> pending_;
};

class Hub {
 public:
  explicit Hub(int size) : left_(size) {}
  int size() const { return static_cast<int>(left_.size()); }

  // The `nth` group of this name and these ranks.
  std::shared_ptr<Group> group(const std::string& name, const std::vector<int>& ranks, int nth);

  void leave(int rank, const std::string& why);

  // Memory that ranks look for by its token, from `offer` to `withdraw`. take(): null where it is not there.
  void offer(int64_t token, const std::shared_ptr<char>& memory);
  std::shared_ptr<char> take(int64_t token);
  void withdraw(int64_t token);

  // Why a collective that waits for `rank` cannot complete, if so: the job's first failure, or that `rank` has left.
  std::optional<std::string> obstacle(int rank);

 private:
  std::mutex mutex_;
  std::map<std::tuple<std::string, std::vector<int>, int>, std::shared_ptr<Group>> groups_;
  std::map<int64_t, std::shared_ptr<char>> offers_;
  std::vector<bool> left_;
  std::optional<std::string> failure_;
};

}  // namespace dtensor::comm::threads
