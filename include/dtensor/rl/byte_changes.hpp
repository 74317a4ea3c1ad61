// Bytes that have changed: written down as runs where that is less than all bytes, and put in place again, bit for bit.
#pragma once

#include <dtensor/base/error.hpp>

#include <cstdint>
#include <cstring>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Appends to `out` what turns `size` bytes at `old` into those at `now`: runs of changed bytes, each with how many before it are the same,
// or all bytes where that is no longer (one byte more at most), or where `old` is null.
void append_changes(const uint8_t* old, const uint8_t* now, size_t size, std::vector<uint8_t>& out);

// Changes `size` bytes at `data` by what append_changes wrote at `from`, and gives where that ends. Throws where it would end after `end`,
// or is of another size.
const uint8_t* apply_changes(const uint8_t* from, const uint8_t* end, uint8_t* data, size_t size);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kChanges = "rl::apply_changes";
enum ChangeKind : uint8_t { all_bytes, runs_of_bytes };

// Seven bits a byte, the low ones first.
inline void append_number(uint64_t number, std::vector<uint8_t>& out) {
  for (; number >= 128; number >>= 7) out.push_back(static_cast<uint8_t>(number | 128));
  out.push_back(static_cast<uint8_t>(number));
}
inline uint64_t read_number(const uint8_t*& from, const uint8_t* end) {
  uint64_t number = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    require(from < end, kChanges, "the changes end within a number");
    number |= static_cast<uint64_t>(*from & 127) << shift;
    if (*from++ < 128) break;
  }
  return number;
}

// From `at` on, the first byte that differs.
inline size_t next_change(const uint8_t* old, const uint8_t* now, size_t at, size_t size) {
  while (at + 32 <= size && std::memcmp(old + at, now + at, 32) == 0) at += 32;
  while (at < size && old[at] == now[at]) ++at;
  return at;
}

// The end of a run of changes, in which up to two bytes in a row may be the same: another run would cost as much.
inline size_t end_of_run(const uint8_t* old, const uint8_t* now, size_t at, size_t size) {
  size_t end = at;
  for (; at < size && at < end + 3; ++at) {
    if (old[at] != now[at]) end = at + 1;
  }
  return end;
}

}  // namespace detail

inline void append_changes(const uint8_t* old, const uint8_t* now, size_t size, std::vector<uint8_t>& out) {
  const auto begin = out.size();
  out.push_back(detail::runs_of_bytes);
  size_t done = 0;
  while (old && done < size && out.size() - begin <= size) {
    const auto first = detail::next_change(old, now, done, size), last = detail::end_of_run(old, now, first, size);
    detail::append_number(first - done, out);
    detail::append_number(last - first, out);
    out.insert(out.end(), now + first, now + last);
    done = last;
  }
  if (done == size && out.size() - begin <= size + 1) return;
  out.resize(begin);
  out.push_back(detail::all_bytes);
  out.insert(out.end(), now, now + size);
}

inline const uint8_t* apply_changes(const uint8_t* from, const uint8_t* end, uint8_t* data, size_t size) {
  require(from < end, detail::kChanges, "there are no changes");
  if (*from++ == detail::all_bytes) {
    require(static_cast<size_t>(end - from) >= size, detail::kChanges, "got {} bytes; expected {}", end - from, size);
    std::memcpy(data, from, size);
    return from + size;
  }
  for (size_t done = 0; done < size;) {
    const auto same = detail::read_number(from, end), changed = detail::read_number(from, end);
    require(same <= size - done && changed <= size - done - same && changed <= static_cast<size_t>(end - from), detail::kChanges,
            "{} bytes change after {} that do not, of {}", changed, done + same, size);
    std::memcpy(data + done + same, from, changed);
    from += changed;
    done += same + changed;
  }
  return from;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
