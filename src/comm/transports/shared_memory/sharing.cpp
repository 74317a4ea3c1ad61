#include "src/comm/transports/shared_memory/sharing.hpp"

#include "src/comm/transports/shared_memory/file.hpp"

#include <cerrno>
#include <limits>
#include <system_error>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace dtensor::comm::shared_memory {

namespace {

// No call of a group has this stream and number.
constexpr uint64_t kNoStream = 0, kNever = std::numeric_limits<uint64_t>::max();

[[noreturn]] void throw_errno() { throw std::system_error(errno, std::generic_category()); }

std::shared_ptr<char> mapped(int fd, int64_t bytes) {
  void* memory = map(fd, 0, bytes);
  if (!memory) throw_errno();
  return {static_cast<char*>(memory), [bytes](char* begin) { munmap(begin, static_cast<size_t>(bytes)); }};
}

std::shared_ptr<int> closing(int fd) {
  if (fd < 0) throw_errno();
  return {new int(fd), [](const int* open) {
            close(*open);
            delete open;
          }};
}

}  // namespace

FileSharing::FileSharing(std::shared_ptr<gloo::Link> link, const std::shared_ptr<Arena>& arena, std::vector<int> ranks,
                         const Transport& transport)
    : link_(std::move(link)), ranks_(std::move(ranks)), transport_(transport) {
  for (const int rank : ranks_) processes_.push_back(arena->process(rank));
}

MemorySharing::Offer FileSharing::offer(int64_t bytes) {
  check_memory_is_left(bytes);
  auto file = closing(memfd_create("dtensor-symmetric", MFD_CLOEXEC));
  if (!grow(*file, 0, bytes)) throw_errno();
  Offer made{mapped(*file, bytes), {*file, memory_token()}, file};
  *reinterpret_cast<int64_t*>(made.memory.get()) = made.ticket.token;
  return made;
}

// Another file may be there where the owner has given up meanwhile.
std::shared_ptr<char> FileSharing::take(int owner, const MemoryTicket& ticket, int64_t bytes) {
  const auto file = closing(open_of(processes_[owner], static_cast<int>(ticket.place)));
  struct stat status{};
  if (fstat(*file, &status) != 0) throw_errno();
  if (status.st_size != bytes) throw std::system_error(ESTALE, std::generic_category());
  auto memory = mapped(*file, bytes);
  if (*reinterpret_cast<const int64_t*>(memory.get()) != ticket.token) throw std::system_error(ESTALE, std::generic_category());
  return memory;
}

std::optional<std::string> FileSharing::obstacle(int member) { return link_->obstacle({ranks_[member], kNoStream, kNever}); }

}  // namespace dtensor::comm::shared_memory
