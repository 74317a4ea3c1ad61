// The memory that the ranks of one host share: an anonymous file, which grows by a region for each group and has a bell for each rank. It
// has no name, so nothing is left behind when a job is killed. Where the system allows it, ranks also read each other's own memory.
#pragma once

#include "src/comm/bell.hpp"
#include "src/comm/rendezvous/rendezvous.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

namespace dtensor::comm::shared_memory {

// A mapped part of the arena; unmapped and given back on destruction.
class Region;
struct Card;

class Arena {
 public:
  // Finds the ranks that share memory with this one. Every rank of the job calls it; those that do not `take_part` share
  // with nobody.
  static std::shared_ptr<Arena> meet(Rendezvous& rendezvous, int rank, int size, bool take_part);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Whether these world ranks, this one included, share the memory.
  bool holds(const std::vector<int>& ranks) const;
  // How many ranks share it.
  int size() const { return static_cast<int>(positions_.size()); }

  // Where the threads of a rank sleep.
  Bell& bell(int world_rank);

  // Whether all of them can read the memory of all.
  bool reads_directly() const { return reads_directly_; }
  pid_t process(int world_rank) const { return processes_.at(world_rank); }

  // The memory of the group that all its members call `id`: `bytes`, of which the first `zeroed` are zero. Null on every member when
  // there is no room.
  static std::shared_ptr<Region> region(const std::shared_ptr<Arena>& arena, uint64_t id, int members, int64_t zeroed, int64_t bytes);

 private:
  friend class Region;
  struct Header;
  struct Entry;
  Arena() = default;
  void make();
  bool join(const Card& card);
  void forget();
  void give_back(int entry);
  Entry* claim(uint64_t id, int members, int64_t zeroed, int64_t bytes);

  int fd_ = -1;
  Header* header_ = nullptr;
  std::map<int, int> positions_;  // world rank -> which bell
  std::map<int, pid_t> processes_;
  bool reads_directly_ = false;
};

class Region {
 public:
  Region(std::shared_ptr<Arena> arena, int entry, char* data, int64_t bytes)
      : arena_(std::move(arena)), entry_(entry), data_(data), bytes_(bytes) {}
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  char* data() const { return data_; }

 private:
  std::shared_ptr<Arena> arena_;
  const int entry_;
  char* const data_;
  const int64_t bytes_;
};

}  // namespace dtensor::comm::shared_memory
