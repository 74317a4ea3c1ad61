#include "src/comm/flight/ring.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <iterator>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace dtensor::comm::flight {

namespace {

[[noreturn]] void throw_errno(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

void* map_file(const std::string& file, size_t bytes) {
  const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) throw_errno(file);
  // Room that is not there would end the process at the first write to it, and a file above its limit at once.
  rlimit limit{};
  int error = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes ? EFBIG : 0;
  if (error == 0) error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  void* memory = error == 0 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (error != 0) errno = error;
  if (memory == MAP_FAILED) {
    unlink(file.c_str());
    throw_errno(file);
  }
  return memory;
}

Recording copy_of(const RingHeader& header, const Event* events) {
  Recording copy;
  copy.rank = header.rank, copy.ranks = header.ranks, copy.process = header.process, copy.thread = header.thread;
  copy.state = header.state, copy.signal = header.signal, copy.answers = header.answers != 0;
  copy.stack.assign(header.stack, header.stack + std::clamp<int>(header.depth, 0, kMostFrames));
  copy.host = std::string_view(header.host);
  copy.error = std::string_view(header.error);
  copy.groups.assign(header.group, header.group + std::clamp<int>(header.groups, 0, kMostGroups));
  for (auto& group : copy.groups) group.size = std::max(group.size, 0);
  const auto issued = header.issued.load();
  const auto kept = std::min(issued, Events::kKept);
  for (auto number = issued - kept; kept > 0 && number < issued; ++number) {
    const Event event = read_slot(events[number % Events::kKept]);
    if (event.number == number + 1) copy.events.push_back(event);
  }
  return copy;
}

// Whether it can be what a rank left: files are cut, and written over.
bool is_sane(const RingHeader& header) {
  return header.rank >= 0 && header.rank < header.ranks && header.ranks <= kMostRanks && header.process >= 0 &&
         header.state.load() >= State::running && header.state.load() <= State::failed;
}

using Word [[gnu::may_alias]] = uint64_t;
constexpr size_t kWords = sizeof(Event) / sizeof(Word);

Word* words_of(const Event& event) { return reinterpret_cast<Word*>(const_cast<Event*>(&event)); }

}  // namespace

void write_slot(Event& slot, const Event& event) {
  static_assert(offsetof(Event, number) == 0 && sizeof(Event) % sizeof(Word) == 0);
  auto* const to = words_of(slot);
  const auto* const from = words_of(event);
  __atomic_store_n(to, 0, __ATOMIC_RELAXED);
  for (size_t i = 1; i < kWords; ++i) __atomic_store_n(to + i, from[i], __ATOMIC_RELEASE);  // who sees the word sees the 0
  __atomic_store_n(to, from[0], __ATOMIC_RELEASE);
}

Event read_slot(const Event& slot) {
  Event copy;
  auto* const to = words_of(copy);
  const auto* const from = words_of(slot);
  to[0] = __atomic_load_n(from, __ATOMIC_ACQUIRE);
  for (size_t i = 1; i < kWords; ++i) to[i] = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
  if (__atomic_load_n(from, __ATOMIC_RELAXED) != to[0]) copy.number = 0;
  return copy;
}

Ring::Ring(const std::string& file) {
  if (file.empty()) {
    memory_ = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw_errno("memory for events");
  } else {
    memory_ = map_file(file, bytes());
  }
  std::copy_n(kMagic, sizeof kMagic, header().magic);
}

Ring::~Ring() { munmap(memory_, bytes()); }

Recording copy_of(const Ring& ring) { return copy_of(ring.header(), &ring.slot(1)); }

std::optional<Recording> read_file(const std::string& file) {
  const auto bytes = read_text(file);
  if (bytes.size() != Ring::bytes() || !bytes.starts_with(std::string_view(kMagic, sizeof kMagic))) return std::nullopt;
  std::vector<uint64_t> aligned(bytes.size() / sizeof(uint64_t) + 1);
  std::memcpy(aligned.data(), bytes.data(), bytes.size());
  const auto* begin = reinterpret_cast<const char*>(aligned.data());
  const auto& header = *reinterpret_cast<const RingHeader*>(begin);
  if (!is_sane(header)) return std::nullopt;
  return copy_of(header, reinterpret_cast<const Event*>(begin + sizeof(RingHeader)));
}

std::string file_of_rank(const std::string& folder, int rank) { return fmt::format("{}/rank-{}.events", folder, rank); }
std::string maps_of_process(const std::string& folder, int process) { return fmt::format("{}/process-{}.maps", folder, process); }

std::string read_text(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace dtensor::comm::flight
