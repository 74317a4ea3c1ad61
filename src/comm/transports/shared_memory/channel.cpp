// Places the slots of a group in its memory, and wakes its members.
#include "src/comm/transports/shared_memory/channel.hpp"

#include "src/comm/transports/shared_memory/peer_memory.hpp"

#include <cstring>

#include <fmt/format.h>

namespace dtensor::comm::shared_memory {

namespace {

constexpr int64_t kCallBytes = 128;
static_assert(sizeof(CallInfo) <= kCallBytes);

int64_t counts_bytes(int64_t members) { return (members * 24 + 63) / 64 * 64; }
int64_t slot_bytes(int64_t members) { return kCallBytes + counts_bytes(members) + Channel::kSlotBytes; }

}  // namespace

std::unique_ptr<Channel> Channel::open(const std::shared_ptr<Arena>& arena, uint64_t id, const std::vector<int>& ranks, int self) {
  const auto members = static_cast<int64_t>(ranks.size());
  const int64_t head = members * static_cast<int64_t>(sizeof(Member));
  auto region = Arena::region(arena, id, static_cast<int>(members), head, head + members * kSlots * slot_bytes(members));
  if (!region) return nullptr;
  std::vector<Bell*> bells;
  std::vector<pid_t> processes;
  for (int rank : ranks) {
    bells.push_back(&arena->bell(rank));
    if (arena->reads_directly()) processes.push_back(arena->process(rank));
  }
  return std::unique_ptr<Channel>(new Channel(std::move(region), std::move(bells), std::move(processes), self));
}

Slot Channel::slot(int who, uint64_t round) const {
  const int64_t which = who * kSlots + static_cast<int64_t>(round % kSlots);
  char* begin = region_->data() + size() * static_cast<int64_t>(sizeof(Member)) + which * slot_bytes(size());
  return {reinterpret_cast<CallInfo*>(begin), reinterpret_cast<int64_t*>(begin + kCallBytes), begin + kCallBytes + counts_bytes(size())};
}

bool Channel::all_posted(uint64_t round) const {
  for (int who = 0; who < size(); ++who) {
    if (!has_posted(who, round)) return false;
  }
  return true;
}

bool Channel::all_made_room(uint64_t round) const {
  for (int who = 0; who < size(); ++who) {
    if (who != self_ && !has_made_room(who, round)) return false;
  }
  return true;
}

void Channel::read_memory(int who, int64_t address, void* to, int64_t bytes) const {
  const int error = shared_memory::read_memory(processes_[who], static_cast<uint64_t>(address), to, bytes);
  if (member(who).withdrawn.load()) throw Lost{who, "it has given up a call"};
  if (error != 0) throw Lost{who, fmt::format("its memory cannot be read: {}", std::strerror(error))};
}

// A round can be read when its last post has come, so only that one wakes; likewise for room.
void Channel::post(uint64_t round) {
  member(self_).posted.store(round + 1);
  if (!all_posted(round)) return;
  for (int who = 0; who < size(); ++who) {
    if (who != self_) bells_[who]->ring();
  }
}

void Channel::consume(uint64_t round) {
  member(self_).consumed.store(round + 1);
  for (int who = 0; who < size(); ++who) {
    if (member(who).consumed.load() <= round) return;
  }
  for (int who = 0; who < size(); ++who) {
    if (who != self_ && member(who).wants_room.load()) bells_[who]->ring();
  }
}

}  // namespace dtensor::comm::shared_memory
