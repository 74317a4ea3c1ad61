#include "src/launch/place.hpp"

#include "src/launch/environment.hpp"

#include <c10/util/Type.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <dlfcn.h>
#include <link.h>

namespace dtensor::detail {

namespace {

bool is_wanted() { return read_environment("DTENSOR_BACKTRACE").value_or("0") != "0" || read_environment("DTENSOR_REPORT_FD"); }

// libtorch 1.13 has the text of the stack; later ones make it when it is asked for.
template <class Error>
std::string stack_of(const Error& error) {
  const auto& stack = error.backtrace();
  if constexpr (std::is_convertible_v<decltype(stack), std::string>) {
    return stack;
  } else {
    return stack ? stack->get() : std::string();
  }
}

// Of a text of which a line is "frame #2: NAME + 0x57 (0x7f1234 in FILE)" or "frame #2: FILE(+0x57) [0x7f1234]".
std::vector<uint64_t> addresses_in(const std::string& stack) {
  std::vector<uint64_t> addresses;
  std::istringstream lines(stack);
  for (std::string line; std::getline(lines, line);) {
    auto at = line.rfind("[0x");
    if (at == std::string::npos) at = line.rfind("(0x");
    if (line.starts_with("frame #") && at != std::string::npos) addresses.push_back(std::strtoull(line.c_str() + at + 1, nullptr, 16));
  }
  return addresses;
}

std::string_view name_of(std::string_view file) { return file.substr(file.rfind('/') + 1); }  // of npos: 0

bool is_of_libraries(std::string_view path) {
  const auto file = name_of(path);
  for (const auto* name :
       {"libtorch", "libc10", "libdtensor", "libc.", "libm.", "libstdc++", "libgcc", "libgomp", "libpthread", "ld-linux"}) {
    if (file.starts_with(name)) return true;
  }
  return false;
}

// What addr2line takes: in files that are loaded anywhere, counted from where this one was.
uintptr_t address_in_file(uintptr_t address, const Dl_info& info) {
  const auto* header = static_cast<const ElfW(Ehdr)*>(info.dli_fbase);
  return header->e_type == ET_DYN ? address - reinterpret_cast<uintptr_t>(info.dli_fbase) : address;
}

}  // namespace

std::vector<uint64_t> addresses_of(const c10::Error& error) { return addresses_in(stack_of(error)); }

void add_place(c10::Error& error) {
  if (!is_wanted()) return;
  std::vector<std::string> frames;
  std::string hint;
  for (const auto after_call : addresses_of(error)) {
    const auto address = after_call - 1;  // in the call
    Dl_info info{};
    if (frames.size() == 8) break;
    if (!dladdr(reinterpret_cast<void*>(address), &info) || is_of_libraries(info.dli_fname)) continue;
    const auto name = info.dli_sname ? c10::demangle(info.dli_sname) + " in " : std::string();
    const auto in_file = address_in_file(address, info);
    frames.push_back(fmt::format("{}{}+{:#x}", name, name_of(info.dli_fname), in_file));
    if (hint.empty()) hint = fmt::format("addr2line -Cfpe {}", info.dli_fname);
    if (hint.find(info.dli_fname) != std::string::npos) hint += fmt::format(" {:#x}", in_file);
  }
  if (!frames.empty()) error.add_context(fmt::format("thrown at {}; for lines of source: {}", fmt::join(frames, ", from "), hint));
}

}  // namespace dtensor::detail
