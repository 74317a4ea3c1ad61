// Zip archives (https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT) as torch.save makes them: stored records, also above 4 GiB.
// An archive may be a part of a file. Functions throw std::runtime_error.
#pragma once

#include "src/checkpoint/disk.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::checkpoints::foreign {

class ZipReader {
 public:
  // Reads the directory of the archive in `bytes` bytes of a file from `begin` on. The file must outlive the reader.
  ZipReader(const disk::File& file, int64_t begin, int64_t bytes);

  struct Record {
    int64_t header = 0;  // where its own header begins, in the archive
    int64_t bytes = 0;
    uint32_t sum = 0;
    bool is_stored = true;
  };
  const std::map<std::string, Record>& records() const { return records_; }
  const Record* find(const std::string& name) const;

  // Where the data of a record begin, in the file. Throws for a compressed one.
  int64_t offset_of(const std::string& name) const;

  // A record of at most `most` bytes, its checksum compared where it has one.
  std::string read(const std::string& name, int64_t most) const;

 private:
  std::string bytes(int64_t at, int64_t count) const;
  struct Directory {
    int64_t offset = 0, bytes = 0, records = 0;
  };
  Directory find_directory() const;
  std::optional<Directory> find_directory(int64_t tail_bytes) const;  // in so many bytes of the end
  size_t add_record(std::string_view directory, size_t at);

  const disk::File& file_;
  int64_t begin_, bytes_;
  std::map<std::string, Record> records_;
};

// Writes an archive at the end of a file that is being written. Data begin at multiples of 64 bytes of the archive.
class ZipWriter {
 public:
  explicit ZipWriter(disk::NewFile& file) : file_(file) {}

  void add(const std::string& name, const void* data, int64_t bytes);
  int64_t finish();  // writes the directory; returns the bytes of the archive

 private:
  void write(const std::string& bytes);
  disk::NewFile& file_;
  int64_t at_ = 0, count_ = 0;
  std::string directory_;
};

}  // namespace dtensor::checkpoints::foreign
