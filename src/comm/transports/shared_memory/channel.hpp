// The shared memory of one group. Every member has a few slots, which only it writes and all others read. Members go through numbered
// rounds. In a round each member writes its slot and posts it; when all have posted, each reads the others' slots and has then consumed the
// round. Slots are used in turn, so a member is at most kSlots rounds ahead of the readers. Long data may bypass the slots: where the
// system allows it, members read each other's memory.
#pragma once

#include "src/comm/describe.hpp"
#include "src/comm/transports/shared_memory/arena.hpp"

#include <algorithm>
#include <string>

namespace dtensor::comm::shared_memory {

// A member's part of one round.
struct Slot {
  CallInfo* call;   // of the collective that the round begins, if it does
  int64_t* counts;  // room for three numbers per member
  char* data;       // kSlotBytes
};

// The memory of a member could not be read, or it has given the operation up.
struct Lost {
  int who;
  std::string why;
};

class Channel {
 public:
  static constexpr int kSlots = 8;
  static constexpr int64_t kSlotBytes = 256 << 10;  // the slots of a few ranks fit into a cache

  // Null when there is no room; then it is null on every member.
  static std::unique_ptr<Channel> open(const std::shared_ptr<Arena>& arena, uint64_t id, const std::vector<int>& ranks, int self);

  int size() const { return static_cast<int>(bells_.size()); }
  int self() const { return self_; }

  // Of member `who`, for the round.
  Slot slot(int who, uint64_t round) const;
  // Where slots are cut into one piece for each other member.
  static int64_t piece_bytes(int64_t members) { return kSlotBytes / std::max<int64_t>(1, members - 1) / 64 * 64; }

  bool has_posted(int who, uint64_t round) const { return member(who).posted.load() > round; }
  // Whether `who` has read what was in this member's slot before `round`.
  bool has_made_room(int who, uint64_t round) const { return member(who).consumed.load() + kSlots > round; }
  bool all_posted(uint64_t round) const;
  bool all_made_room(uint64_t round) const;

  // This member has written, or read, everything of the round. Wakes those that wait for it.
  void post(uint64_t round);
  void consume(uint64_t round);
  // Whether consume() of the others is to wake this member.
  void want_room(bool value) { member(self_).wants_room.store(value); }

  // Whether the members can read each other's memory.
  bool reads_directly() const { return !processes_.empty(); }
  // Copies `bytes` from `address` of member `who`, whose operation of it must still be under way. Throws Lost.
  void read_memory(int who, int64_t address, void* to, int64_t bytes) const;
  // From now on nobody is to use what is read from this member's memory.
  void withdraw() { member(self_).withdrawn.store(true); }

 private:
  struct alignas(64) Member {
    std::atomic<uint64_t> posted, consumed;  // how many rounds
    std::atomic<bool> wants_room, withdrawn;
  };

  Channel(std::shared_ptr<Region> region, std::vector<Bell*> bells, std::vector<pid_t> processes, int self)
      : region_(std::move(region)), bells_(std::move(bells)), processes_(std::move(processes)), self_(self) {}
  Member& member(int who) const { return reinterpret_cast<Member*>(region_->data())[who]; }

  std::shared_ptr<Region> region_;
  std::vector<Bell*> bells_;
  std::vector<pid_t> processes_;  // of the members; empty: their memory cannot be read
  const int self_;
};

}  // namespace dtensor::comm::shared_memory
