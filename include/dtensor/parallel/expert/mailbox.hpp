// Where ranks that share memory put rows for each other, in place of sending them.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/comm/symmetric_memory.hpp>
#include <dtensor/mesh/world.hpp>

#include <deque>
#include <map>
#include <memory>
#include <mutex>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// Of one group, on one rank. All ranks of the group make the same calls in the same order, so that trip n has the same place on all of them
// although nobody asks. A place is used again in turn, as late as can be.
class Mailbox {
 public:
  // The group's; null where its ranks share no memory.
  static Mailbox* of(const DeviceMesh& mesh);

  // One exchange of all ranks with all.
  struct Trip {
    std::shared_ptr<SymmetricMemory> memory;
    int64_t at = 0, bytes = 0;                // where, in the part of each rank
    int64_t number = 0;                       // of signals that say that the rows are there
    int64_t read_before = 0;                  // of signals that say that what was there before was read
  };
  // `bytes`: what the rank with the most rows gets; the same on all ranks. Where there is no room, all ranks make new memory together.
  Trip begin(int64_t bytes);
  // Everything was put: tells the others. Everything was read: likewise, and others may put there again.
  static void tell_put(const Trip& trip) { tell(trip, kPut); }
  void end(Trip trip);
  // Until `from` has put its rows; until `to` lets this rank put any.
  static void wait_for(const Trip& trip, int from) { wait(trip, from, trip.number, kPut); }
  static void wait_for_room(const Trip& trip, int to) { wait(trip, to, trip.read_before, kRead); }

 private:
  explicit Mailbox(const DeviceMesh& mesh) : mesh_(mesh) {}
  struct Region {
    int64_t at, end, number;
    int64_t read;  // which signal says that it was read; 0: not yet
  };
  static constexpr int kPut = 0, kRead = 1;  // pads: rows are there; rows were read
  static void tell(const Trip& trip, int pad);
  static void wait(const Trip& trip, int rank, int64_t count, int pad);
  bool find(int64_t bytes, Trip& trip);

  const DeviceMesh mesh_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::deque<Region> regions_;  // the last ones, oldest first
  int64_t next_ = 0, trips_ = 0, read_ = 0;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline Mailbox* Mailbox::of(const DeviceMesh& mesh) {
  if (!SymmetricMemory::is_available(dtensor::detail::group_of(mesh))) return nullptr;
  struct Mailboxes {
    std::mutex mutex;
    std::map<const void*, std::unique_ptr<Mailbox>> of_mesh;
  };
  auto& all = mesh.world().local<Mailboxes>();
  const std::lock_guard lock(all.mutex);
  auto& mailbox = all.of_mesh[mesh.id()];
  if (!mailbox) mailbox.reset(new Mailbox(mesh));
  return mailbox.get();
}

// After the last one, or at the beginning: not where rows lie that this rank has not read.
inline bool Mailbox::find(int64_t bytes, Trip& trip) {
  if (!memory_ || bytes > memory_->bytes()) return false;
  trip.at = next_ + bytes <= memory_->bytes() ? next_ : 0;
  for (const auto& region : regions_) {
    if (region.at >= trip.at + bytes || trip.at >= region.end) continue;
    if (region.read == 0) return false;
    trip.read_before = std::max(trip.read_before, region.read);
  }
  std::erase_if(regions_, [&](const Region& region) { return region.at >= trip.at && region.end <= trip.at + bytes; });
  return true;
}

inline Mailbox::Trip Mailbox::begin(int64_t bytes) {
  Trip trip{nullptr, 0, (bytes + 63) / 64 * 64, 0, 0};
  if (!find(trip.bytes, trip)) {
    const auto more = std::max(2 * (memory_ ? memory_->bytes() : 0), 4 * trip.bytes);
    memory_ = std::make_shared<SymmetricMemory>(dtensor::detail::group_of(mesh_), more, 2);
    regions_.clear();
    next_ = trips_ = read_ = trip.at = trip.read_before = 0;
  }
  trip.memory = memory_;
  trip.number = ++trips_;
  next_ = trip.at + trip.bytes;
  regions_.push_back({trip.at, next_, trip.number, 0});
  return trip;
}

inline void Mailbox::tell(const Trip& trip, int pad) {
  auto& memory = *trip.memory;
  for (int r = 0; r < memory.size(); ++r) {
    if (r != memory.rank()) memory.signal(r, pad);
  }
}

inline void Mailbox::wait(const Trip& trip, int rank, int64_t count, int pad) {
  auto& memory = *trip.memory;
  if (rank != memory.rank() && memory.signals(rank, pad) < count) memory.wait(rank, count, pad);
}

inline void Mailbox::end(Trip trip) {
  tell(trip, kRead);
  if (trip.memory != memory_) return;
  ++read_;
  for (auto& region : regions_) {
    if (region.number == trip.number) region.read = read_;
  }
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
