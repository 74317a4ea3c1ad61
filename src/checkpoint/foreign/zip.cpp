#include "src/checkpoint/foreign/zip.hpp"

#include "src/checkpoint/crc32.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace dtensor::checkpoints::foreign {

namespace {

constexpr uint32_t kHeader = 0x04034b50, kEntry = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator = 0x07064b50;
constexpr int64_t kHeaderBytes = 30, kEntryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocatorBytes = 20;
constexpr int64_t kMostDirectory = int64_t{1} << 30;
constexpr uint32_t kIn64 = 0xffffffff;  // the number is in the zip64 field
constexpr int64_t kAlignment = 64;

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error("it is no sound zip archive: " + why); }

template <class T>
T number_at(std::string_view bytes, size_t at) {
  if (at > bytes.size() || sizeof(T) > bytes.size() - at) refuse("it is cut off");
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

int64_t size_from(uint64_t number) {
  if (number > static_cast<uint64_t>(INT64_MAX)) refuse("a size is out of range");
  return static_cast<int64_t>(number);
}

// Takes the numbers of an entry that do not fit in 32 bits from its zip64 field, where they stand in this order.
void take_from_64(std::string_view extra, std::initializer_list<uint64_t*> numbers) {
  if (std::ranges::none_of(numbers, [](const uint64_t* number) { return *number == kIn64; })) return;
  for (size_t at = 0; at + 4 <= extra.size();) {
    const auto id = number_at<uint16_t>(extra, at), bytes = number_at<uint16_t>(extra, at + 2);
    const auto field = extra.substr(at + 4, bytes);
    at += size_t{4} + bytes;
    if (id != 1) continue;
    size_t next = 0;
    for (auto* number : numbers) {
      if (*number != kIn64) continue;
      *number = number_at<uint64_t>(field, next);
      next += 8;
    }
    return;
  }
}

template <class T>
void put(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

ZipReader::ZipReader(const disk::File& file, int64_t begin, int64_t bytes) : file_(file), begin_(begin), bytes_(bytes) {
  const auto size = file.size();
  if (begin < 0 || bytes < 0 || begin > size || bytes > size - begin)
    refuse(fmt::format("it ends behind the file, which has {} bytes", size));
  const auto found = find_directory();
  const auto directory = this->bytes(found.offset, found.bytes);
  size_t at = 0;
  for (int64_t i = 0; i < found.records; ++i) at = add_record(directory, at);
}

std::string ZipReader::bytes(int64_t at, int64_t count) const {
  if (at < 0 || count < 0 || at > bytes_ || count > bytes_ - at) refuse("it leads out of itself");
  std::string result(static_cast<size_t>(count), '\0');
  file_.read(result.data(), result.size(), begin_ + at);
  return result;
}

ZipReader::Directory ZipReader::find_directory() const {
  if (const auto found = find_directory(kEndBytes)) return *found;
  if (const auto found = find_directory(kEndBytes + 0xffff)) return *found;  // with a comment behind it
  refuse("it has no directory; it may be cut off");
}

std::optional<ZipReader::Directory> ZipReader::find_directory(int64_t tail_bytes) const {
  tail_bytes = std::min(bytes_, tail_bytes);
  const auto tail = bytes(bytes_ - tail_bytes, tail_bytes);
  for (auto at = tail_bytes - kEndBytes; at >= 0; --at) {
    const auto place = static_cast<size_t>(at);
    if (number_at<uint32_t>(tail, place) != kEnd || number_at<uint16_t>(tail, place + 20) != tail_bytes - at - kEndBytes) continue;
    uint64_t records = number_at<uint16_t>(tail, place + 10), size = number_at<uint32_t>(tail, place + 12);
    uint64_t offset = number_at<uint32_t>(tail, place + 16);
    const auto end = bytes_ - tail_bytes + at;
    if (end >= kLocatorBytes) {
      const auto locator = bytes(end - kLocatorBytes, kLocatorBytes);
      if (number_at<uint32_t>(locator, 0) == kLocator) {
        const auto end64 = bytes(size_from(number_at<uint64_t>(locator, 8)), kEnd64Bytes);
        if (number_at<uint32_t>(end64, 0) != kEnd64) refuse("its end is not where it says");
        records = number_at<uint64_t>(end64, 32);
        size = number_at<uint64_t>(end64, 40);
        offset = number_at<uint64_t>(end64, 48);
      }
    }
    const Directory found{size_from(offset), size_from(size), size_from(records)};
    if (found.bytes > kMostDirectory || found.records > found.bytes / kEntryBytes) refuse("its directory is too small or too large");
    return found;
  }
  return {};
}

size_t ZipReader::add_record(std::string_view directory, size_t at) {
  if (number_at<uint32_t>(directory, at) != kEntry) refuse("its directory has what is no entry");
  const auto method = number_at<uint16_t>(directory, at + 10), flags = number_at<uint16_t>(directory, at + 8);
  uint64_t stored = number_at<uint32_t>(directory, at + 20), size = number_at<uint32_t>(directory, at + 24);
  uint64_t header = number_at<uint32_t>(directory, at + 42);
  const size_t name_bytes = number_at<uint16_t>(directory, at + 28), extra_bytes = number_at<uint16_t>(directory, at + 30);
  const size_t comment_bytes = number_at<uint16_t>(directory, at + 32), begin = at + kEntryBytes;
  if (name_bytes + extra_bytes + comment_bytes > directory.size() - begin) refuse("its directory is cut off");
  take_from_64(directory.substr(begin + name_bytes, extra_bytes), {&size, &stored, &header});
  Record record{size_from(header), size_from(size), number_at<uint32_t>(directory, at + 16), method == 0 && (flags & 1) == 0};
  if (record.is_stored && stored != size) refuse("a stored record has two sizes");
  const auto name = std::string(directory.substr(begin, name_bytes));
  if (!records_.emplace(name, record).second) refuse(fmt::format("the record '{}' is there twice", name));
  return begin + name_bytes + extra_bytes + comment_bytes;
}

const ZipReader::Record* ZipReader::find(const std::string& name) const {
  const auto found = records_.find(name);
  return found == records_.end() ? nullptr : &found->second;
}

int64_t ZipReader::offset_of(const std::string& name) const {
  const auto* record = find(name);
  if (!record) refuse(fmt::format("it has no record '{}'", name));
  if (!record->is_stored)
    throw std::runtime_error(fmt::format("its record '{}' is compressed or encrypted, which torch.save does not do", name));
  const auto header = bytes(record->header, kHeaderBytes);
  if (number_at<uint32_t>(header, 0) != kHeader) refuse(fmt::format("the record '{}' is not where it should be", name));
  const auto data = record->header + kHeaderBytes + number_at<uint16_t>(header, 26) + number_at<uint16_t>(header, 28);
  if (data > bytes_ || record->bytes > bytes_ - data) refuse(fmt::format("the record '{}' ends behind the file", name));
  return begin_ + data;
}

std::string ZipReader::read(const std::string& name, int64_t most) const {
  const auto offset = offset_of(name);
  const auto& record = *find(name);
  if (record.bytes > most) refuse(fmt::format("the record '{}' has {} bytes; expected at most {}", name, record.bytes, most));
  auto data = bytes(offset - begin_, record.bytes);
  files::Crc32 sum;
  sum.add(data.data(), data.size());
  if (record.sum != 0 && record.sum != sum.get()) refuse(fmt::format("the checksum of the record '{}' is wrong", name));
  return data;
}

void ZipWriter::write(const std::string& bytes) {
  file_.write(bytes.data(), bytes.size());
  at_ += static_cast<int64_t>(bytes.size());
}

void ZipWriter::add(const std::string& name, const void* data, int64_t bytes) {
  files::Crc32 sum;
  sum.add(static_cast<const char*>(data), static_cast<size_t>(bytes));
  const bool is_large = bytes >= kIn64, is_far = at_ >= kIn64;
  const auto header_at = at_;
  const auto size = is_large ? kIn64 : static_cast<uint32_t>(bytes);
  // What both headers of a record have.
  const auto common = [&](std::string& header) {
    put<uint16_t>(header, is_large || is_far ? 45 : 20);  // version
    put<uint16_t>(header, 0x800);                         // names are UTF-8
    put<uint16_t>(header, 0);                             // stored
    put<uint32_t>(header, 0x00210000);                    // 1980-01-01
    put<uint32_t>(header, sum.get());
    put<uint32_t>(header, size);
    put<uint32_t>(header, size);
    put<uint16_t>(header, static_cast<uint16_t>(name.size()));
  };
  std::string header;
  put(header, kHeader);
  common(header);
  std::string extra;
  if (is_large) put<uint16_t>(extra, 1), put<uint16_t>(extra, 16), put(extra, bytes), put(extra, bytes);
  const auto before = at_ + kHeaderBytes + static_cast<int64_t>(name.size() + extra.size()) + 4;
  const auto padding = static_cast<uint16_t>((kAlignment - before % kAlignment) % kAlignment);
  put<uint16_t>(extra, 0x4246), put(extra, padding);
  extra.append(padding, 'Z');
  put<uint16_t>(header, static_cast<uint16_t>(extra.size()));
  write(header + name + extra);
  file_.write(data, static_cast<size_t>(bytes));
  at_ += bytes;

  std::string in_64;
  if (is_large) put(in_64, bytes), put(in_64, bytes);
  if (is_far) put(in_64, header_at);
  put(directory_, kEntry);
  put<uint16_t>(directory_, 45);
  common(directory_);
  put<uint16_t>(directory_, static_cast<uint16_t>(in_64.empty() ? 0 : 4 + in_64.size()));
  directory_.append(10, '\0');  // no comment, first disk, no attributes
  put(directory_, is_far ? kIn64 : static_cast<uint32_t>(header_at));
  directory_ += name;
  if (!in_64.empty()) put<uint16_t>(directory_, 1), put(directory_, static_cast<uint16_t>(in_64.size())), directory_ += in_64;
  ++count_;
}

int64_t ZipWriter::finish() {
  const auto offset = at_, bytes = static_cast<int64_t>(directory_.size());
  write(directory_);
  if (count_ >= 0xffff || offset >= kIn64 || bytes >= kIn64) {
    std::string end;
    put(end, kEnd64);
    put<uint64_t>(end, kEnd64Bytes - 12);
    put<uint16_t>(end, 45), put<uint16_t>(end, 45), put<uint32_t>(end, 0), put<uint32_t>(end, 0);
    put(end, count_), put(end, count_), put(end, bytes), put(end, offset);
    put(end, kLocator), put<uint32_t>(end, 0), put(end, at_), put<uint32_t>(end, 1);
    write(end);
  }
  std::string end;
  const auto most = static_cast<uint16_t>(std::min<int64_t>(count_, 0xffff));
  put(end, kEnd), put<uint32_t>(end, 0), put(end, most), put(end, most);
  put(end, static_cast<uint32_t>(std::min<int64_t>(bytes, kIn64))), put(end, static_cast<uint32_t>(std::min<int64_t>(offset, kIn64)));
  put<uint16_t>(end, 0);
  write(end);
  return at_;
}

}  // namespace dtensor::checkpoints::foreign
