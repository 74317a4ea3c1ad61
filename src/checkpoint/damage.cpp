#include "src/checkpoint/damage.hpp"

#include "src/checkpoint/crc32.hpp"

#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <vector>

namespace dtensor::files {

namespace {

struct Record {
  std::string name;
  uint32_t checksum = 0;
  bool compressed = false;
  uint64_t size = 0, stored = 0, offset = 0;
};

// Thrown for what no archive has.
struct Damage {
  std::string text;
};

void check(bool ok, const char* text) {
  if (!ok) throw Damage{text};
}

template <class T>
T number_at(const std::string& bytes, size_t at) {
  T value{};
  check(at <= bytes.size() && sizeof value <= bytes.size() - at, "its directory is cut off");
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

class Archive {
 public:
  explicit Archive(const std::string& path) : path_(path), in_(path, std::ios::binary | std::ios::ate) {
    size_ = in_ ? static_cast<uint64_t>(in_.tellg()) : 0;
  }

  // Throws Damage.
  void check_records() {
    const auto records = all_records();
    for (const auto& record : records) {
      if (record.checksum == 0 && record.size > 0) continue;  // Python can be told to write none
      const auto sum = record.compressed ? sum_of_compressed(record) : sum_of(record);
      if (sum && *sum != record.checksum) throw Damage{fmt::format("the checksum of its record '{}' is wrong", record.name)};
    }
  }

  // Throws Damage.
  std::string find_program() {
    for (const auto& record : all_records()) {
      if (record.name.find("/code/") == std::string::npos) continue;
      const auto text = as_libtorch_reads(record);
      if (text && text->find("__setstate__") != std::string::npos) return record.name;
    }
    return "";
  }

 private:
  std::vector<Record> all_records() {
    const auto directory = find_directory();
    if (!directory) return {};
    auto records = records_in(*directory);
    for (const auto& record : records) check_place(record);
    return records;
  }

  std::string read(uint64_t offset, uint64_t size) {
    check(offset <= size_ && size <= size_ - offset, "its directory leads out of it");
    std::string bytes(size, '\0');
    in_.seekg(static_cast<std::streamoff>(offset));
    check(static_cast<bool>(in_.read(bytes.data(), static_cast<std::streamsize>(size))), "it cannot be read");
    return bytes;
  }

  // Empty where it is no archive.
  std::optional<std::string> find_directory() {
    constexpr uint64_t kEnd = 22, kLocator = 20, kEnd64 = 56, kLongestComment = 0xffff;
    const auto tail = read(size_ - std::min(size_, kEnd + kLongestComment), std::min(size_, kEnd + kLongestComment));
    const auto at = tail.rfind("PK\5\6");
    if (at == tail.npos || tail.size() - at < kEnd) return std::nullopt;
    uint64_t size = number_at<uint32_t>(tail, at + 12), offset = number_at<uint32_t>(tail, at + 16);
    if (at >= kLocator && tail.compare(at - kLocator, 4, "PK\6\7") == 0) {
      const auto end = read(number_at<uint64_t>(tail, at - kLocator + 8), kEnd64);
      check(end.starts_with("PK\6\6"), "its end is wrong");
      size = number_at<uint64_t>(end, 40), offset = number_at<uint64_t>(end, 48);
    }
    return read(offset, size);
  }

  static std::vector<Record> records_in(const std::string& directory) {
    constexpr size_t kHeader = 46;
    std::vector<Record> records;
    for (size_t at = 0; at < directory.size();) {
      check(directory.compare(at, 4, "PK\1\2") == 0, "its directory is wrong");
      const size_t name = number_at<uint16_t>(directory, at + 28), extra = number_at<uint16_t>(directory, at + 30),
                   comment = number_at<uint16_t>(directory, at + 32);
      Record record{"", number_at<uint32_t>(directory, at + 16), number_at<uint16_t>(directory, at + 10) != 0,
                    number_at<uint32_t>(directory, at + 24), number_at<uint32_t>(directory, at + 20),
                    number_at<uint32_t>(directory, at + 42)};
      check(kHeader + name + extra + comment <= directory.size() - at, "its directory is cut off");
      record.name = directory.substr(at + kHeader, name);
      // libtorch reads nothing where a record counts as a folder, and takes what its memory happens to hold.
      constexpr uint32_t kFolder = 0x10;
      const bool folder = (number_at<uint32_t>(directory, at + 38) & kFolder) != 0 || record.name.ends_with('/');
      check(!folder || record.size == 0, "its directory says that a record is a folder");
      widen(record, directory.substr(at + kHeader + name, extra));
      records.push_back(std::move(record));
      at += kHeader + name + extra + comment;
    }
    return records;
  }

  // Numbers of more than 32 bits stand in a field of their own.
  static void widen(Record& record, const std::string& extra) {
    for (size_t at = 0; at + 4 <= extra.size();) {
      const auto kind = number_at<uint16_t>(extra, at), length = number_at<uint16_t>(extra, at + 2);
      size_t next = at + 4;
      if (kind == 1) {
        for (auto* number : {&record.size, &record.stored, &record.offset}) {
          if (*number != 0xffffffff) continue;
          *number = number_at<uint64_t>(extra, next);
          next += sizeof *number;
        }
      }
      at += 4 + static_cast<size_t>(length);
    }
  }

  // A record of which the directory says more than there is would have libtorch take memory for it.
  void check_place(const Record& record) const {
    constexpr uint64_t kMostCompressed = 1032;  // times, by deflate
    const bool fits = record.offset <= size_ && record.stored <= size_ - record.offset;
    check(fits && (record.compressed ? record.size / kMostCompressed <= record.stored : record.size == record.stored),
          "its directory does not fit its records");
  }

  std::optional<uint32_t> sum_of(const Record& record) {
    const auto header = read(record.offset, 30);
    check(header.starts_with("PK\3\4"), "a record is not where its directory says");
    const uint64_t begin = record.offset + 30 + number_at<uint16_t>(header, 26) + number_at<uint16_t>(header, 28);
    constexpr uint64_t kPiece = 1 << 20;
    Crc32 sum;
    for (uint64_t done = 0; done < record.size; done += kPiece) {
      const auto piece = read(begin + done, std::min(kPiece, record.size - done));
      sum.add(piece.data(), piece.size());
    }
    return sum.get();
  }

  std::optional<uint32_t> sum_of_compressed(const Record& record) {
    const auto bytes = as_libtorch_reads(record);
    if (!bytes) return std::nullopt;
    Crc32 sum;
    sum.add(bytes->data(), bytes->size());
    return sum.get();
  }

  // Empty where libtorch cannot read it, and will say so.
  std::optional<std::string> as_libtorch_reads(const Record& record) {
    try {
      if (!reader_) reader_.emplace(path_);
      const auto [data, size] = reader_->getRecord(record.name.substr(record.name.find('/') + 1));
      return std::string(static_cast<const char*>(data.get()), size);
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

  const std::string path_;
  std::ifstream in_;
  uint64_t size_ = 0;
  std::optional<caffe2::serialize::PyTorchStreamReader> reader_;
};

}  // namespace

std::string damage_of(const std::string& path) {
  try {
    Archive(path).check_records();
  } catch (const Damage& damage) {
    return damage.text;
  }
  return "";
}

std::string program_in(const std::string& path) {
  try {
    return Archive(path).find_program();
  } catch (const Damage&) {
    return "";
  }
}

}  // namespace dtensor::files
