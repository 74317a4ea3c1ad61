// Shares an anonymous file between the processes of a host, and allocates its memory.
#include "src/comm/transports/shared_memory/arena.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/transports/shared_memory/card.hpp"
#include "src/comm/transports/shared_memory/file.hpp"
#include "src/comm/transports/shared_memory/peer_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <mutex>
#include <random>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace dtensor::comm::shared_memory {

namespace {

constexpr int kMostRanks = 1024;
constexpr int kMostGroups = 2048;
constexpr int64_t kPage = 64 << 10;  // at least the system's

int64_t pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::string random_token() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

// What processes of one host have in common: the running kernel, and the container, if they are in one.
std::string host() {
  std::string result;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> result;
  if (result.empty()) return "";
  for (const char* name : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    char space[64] = "";
    if (readlink(name, space, sizeof space - 1) <= 0) return "";
    result += space;
  }
  return result;
}

// A lock among processes, which goes on when its holder has died.
class Lock {
 public:
  explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) {
    if (pthread_mutex_lock(&mutex_) == EOWNERDEAD) pthread_mutex_consistent(&mutex_);
  }
  ~Lock() { pthread_mutex_unlock(&mutex_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

}  // namespace

// A group's place. An entry without an id is free for another group of as many bytes.
struct Arena::Entry {
  uint64_t id;
  int64_t offset, bytes;
  int32_t members, gone;
};

struct Arena::Header {
  char token[kTokenBytes];
  pthread_mutex_t mutex;
  bool full;  // for good, so that all members of a group find the same
  int32_t entry_count;
  int64_t end;
  Bell bells[kMostRanks];
  Entry entries[kMostGroups];
};

Arena::~Arena() { forget(); }

void Arena::forget() {
  if (header_) munmap(header_, pages(sizeof(Header)));
  if (fd_ >= 0) close(fd_);
  header_ = nullptr;
  fd_ = -1;
}

void Arena::make() {
  fd_ = memfd_create("dtensor", MFD_CLOEXEC);
  if (fd_ < 0 || !grow(fd_, 0, pages(sizeof(Header)))) return forget();
  header_ = static_cast<Header*>(map(fd_, 0, pages(sizeof(Header))));
  if (!header_) return forget();
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&header_->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  header_->end = pages(sizeof(Header));
  random_token().copy(header_->token, sizeof header_->token - 1);
}

// The token tells whether the file is the one that was meant.
bool Arena::join(const Card& card) {
  fd_ = open_of(card.process, card.fd);
  struct stat status{};
  if (fd_ < 0 || fstat(fd_, &status) != 0 || status.st_size < pages(sizeof(Header))) return false;
  header_ = static_cast<Header*>(map(fd_, 0, pages(sizeof(Header))));
  return header_ && card.token == std::string_view(header_->token, strnlen(header_->token, kTokenBytes));
}

// Every rank offers a file of its own; that of the first rank of a host is used.
std::shared_ptr<Arena> Arena::meet(Rendezvous& rendezvous, int rank, int size, bool take_part) {
  const auto exchange = [&](const std::string& mine) {
    auto all = rendezvous.exchange(std::vector<std::string>(size, mine));
    all[rank] = mine;
    return all;
  };
  std::shared_ptr<Arena> own(new Arena), arena = own;
  const auto where = take_part ? host() : "";
  if (!where.empty()) own->make();
  Card card;
  if (own->header_) {
    card = {where, getpid(), own->fd_, reinterpret_cast<uint64_t>(own->header_), own->header_->token};
    allow_reads();
  }

  std::map<int, Card> here;  // by rank
  const auto cards = exchange(card.str());
  for (int other = 0; other < size; ++other) {
    auto theirs = Card::parse(cards[other]);
    if (!card.host.empty() && theirs.host == card.host) here.emplace(other, std::move(theirs));
  }
  bool joined = !here.empty();
  if (joined && here.begin()->first != rank) {
    arena.reset(new Arena);
    joined = arena->join(here.begin()->second);
  }
  const bool reads = std::ranges::all_of(here, [](const auto& item) {
    const Card& theirs = item.second;
    return can_read(theirs.process, theirs.header, theirs.token.data(), static_cast<int64_t>(theirs.token.size()));
  });

  // Until here every rank keeps the file that it offered.
  const auto answers = exchange(!joined ? "" : reads ? "joined, and reads" : "joined");
  arena->reads_directly_ = true;
  int position = 0;
  for (const auto& [other, theirs] : here) {
    if (joined && !answers[other].empty() && position < kMostRanks) {
      arena->positions_[other] = position;
      arena->processes_[other] = theirs.process;
      arena->reads_directly_ = arena->reads_directly_ && answers[other] == "joined, and reads";
    }
    ++position;
  }
  return arena;
}

bool Arena::holds(const std::vector<int>& ranks) const {
  return std::ranges::all_of(ranks, [&](int rank) { return positions_.count(rank) > 0; });
}

Bell& Arena::bell(int world_rank) { return header_->bells[positions_.at(world_rank)]; }

// Under the lock. The entry is written last: a holder that dies on the way leaves none.
Arena::Entry* Arena::claim(uint64_t id, int members, int64_t zeroed, int64_t bytes) {
  Entry* free = nullptr;
  for (int i = 0; i < header_->entry_count; ++i) {
    Entry& entry = header_->entries[i];
    if (entry.id == id) return &entry;
    if (entry.id == 0 && entry.bytes == bytes) free = &entry;
  }
  if (header_->full) return nullptr;
  if (free) {
    void* old = map(fd_, free->offset, pages(zeroed));
    if (!old) fail("connect", "cannot map the shared memory of a group: {}", std::strerror(errno));
    std::memset(old, 0, static_cast<size_t>(zeroed));
    munmap(old, static_cast<size_t>(pages(zeroed)));
    free->members = members;
    free->gone = 0;
    free->id = id;
    return free;
  }
  if (header_->entry_count == kMostGroups || !grow(fd_, header_->end, bytes)) {
    header_->full = true;
    return nullptr;
  }
  Entry& entry = header_->entries[header_->entry_count];
  entry = {id, header_->end, bytes, members, 0};
  header_->end += bytes;
  ++header_->entry_count;
  return &entry;
}

std::shared_ptr<Region> Arena::region(const std::shared_ptr<Arena>& arena, uint64_t id, int members, int64_t zeroed, int64_t bytes) {
  bytes = pages(bytes);
  Lock lock(arena->header_->mutex);
  Entry* entry = arena->claim(std::max<uint64_t>(id, 1), members, zeroed, bytes);
  if (!entry) return nullptr;
  auto* data = static_cast<char*>(map(arena->fd_, entry->offset, bytes));
  if (!data) fail("connect", "cannot map {} bytes of shared memory: {}", bytes, std::strerror(errno));
  return std::make_shared<Region>(arena, static_cast<int>(entry - arena->header_->entries), data, bytes);
}

void Arena::give_back(int index) {
  Lock lock(header_->mutex);
  Entry& entry = header_->entries[index];
  if (++entry.gone == entry.members) entry.id = 0;
}

Region::~Region() {
  munmap(data_, static_cast<size_t>(bytes_));
  arena_->give_back(entry_);
}

}  // namespace dtensor::comm::shared_memory
