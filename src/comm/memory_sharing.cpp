#include "src/comm/memory_sharing.hpp"

#include <atomic>
#include <cerrno>
#include <fstream>
#include <random>
#include <string>
#include <system_error>

#include <sys/mman.h>

namespace dtensor::comm {

void check_memory_is_left(int64_t bytes) {
  std::ifstream list("/proc/meminfo");
  std::string name, unit;
  for (int64_t kilobytes = 0; list >> name >> kilobytes; std::getline(list, unit)) {
    if (name == "MemAvailable:" && kilobytes < bytes / 1024) throw std::system_error(ENOMEM, std::generic_category());
  }
}

std::shared_ptr<char> zeroed_memory(int64_t bytes) {
  check_memory_is_left(bytes);
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  return {static_cast<char*>(memory), [bytes](char* begin) { munmap(begin, static_cast<size_t>(bytes)); }};
}

int64_t memory_token() {
  static const int64_t of_process = static_cast<int64_t>(std::random_device()()) << 31;
  static std::atomic<int64_t> next{1};
  return of_process + next.fetch_add(1);
}

}  // namespace dtensor::comm
