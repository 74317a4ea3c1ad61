// The safetensors format (https://github.com/huggingface/safetensors): the length of a header, the header in JSON, the data. Files are read
// as strictly as its own reader reads them.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::checkpoints::safetensors {

struct Entry {
  std::string name;
  std::string dtype;  // "F32"
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes of the data
};

struct Header {
  std::vector<Entry> entries;  // by begin
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  // bytes before the data
};

// The name of a dtype there; nothing where it has none (complex128). And back.
std::optional<std::string> dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> dtype_of(std::string_view name);

// The first bytes of a file with these entries, their offsets given, in this order. A multiple of 8 bytes.
std::string header_text(const std::vector<Entry>& entries, const std::map<std::string, std::string>& metadata);

// The number of header bytes, of the 8 that a file begins with. Throws std::runtime_error where it is above 100,000,000 or beyond the file.
int64_t header_size(const char (&first)[8], int64_t file_bytes);

// Throws std::runtime_error for what is no header: not JSON, repeated names, gaps, overlaps, sizes that overflow or disagree with offsets.
Header parse(std::string_view json, int64_t file_bytes);

// The header of a file. Throws std::runtime_error, naming the file.
Header read_header(const std::string& path);

}  // namespace dtensor::checkpoints::safetensors
