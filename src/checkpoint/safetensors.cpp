#include "src/checkpoint/safetensors.hpp"

#include <dtensor/base/compat.hpp>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

namespace dtensor::checkpoints::safetensors {

namespace {

using nlohmann::json;

constexpr int64_t kMostHeaderBytes = 100'000'000;

struct Dtype {
  std::string_view name;
  int64_t bits;
  std::optional<c10::ScalarType> type;
};
constexpr std::array kDtypes {
  Dtype{"BOOL", 8, c10::kBool}, Dtype{"U8", 8, c10::kByte}, Dtype{"I8", 8, c10::kChar}, Dtype{"I16", 16, c10::kShort},
      Dtype{"F16", 16, c10::kHalf}, Dtype{"BF16", 16, c10::kBFloat16}, Dtype{"I32", 32, c10::kInt}, Dtype{"F32", 32, c10::kFloat},
      Dtype{"C64", 64, c10::kComplexFloat}, Dtype{"F64", 64, c10::kDouble}, Dtype{"I64", 64, c10::kLong},
#if DTENSOR_TORCH_AT_LEAST(2, 1)
      Dtype{"F8_E5M2", 8, c10::ScalarType::Float8_e5m2}, Dtype{"F8_E4M3", 8, c10::ScalarType::Float8_e4m3fn},
#else
      Dtype{"F8_E5M2", 8, {}}, Dtype{"F8_E4M3", 8, {}},
#endif
#if DTENSOR_TORCH_AT_LEAST(2, 3)
      Dtype{"U16", 16, c10::ScalarType::UInt16}, Dtype{"U32", 32, c10::ScalarType::UInt32}, Dtype{"U64", 64, c10::ScalarType::UInt64},
#else
      Dtype{"U16", 16, {}}, Dtype{"U32", 32, {}}, Dtype{"U64", 64, {}},
#endif
      Dtype{"F8_E8M0", 8, {}}, Dtype{"F8_E4M3FNUZ", 8, {}}, Dtype{"F8_E5M2FNUZ", 8, {}}, Dtype{"F6_E2M3", 6, {}},
      Dtype{"F6_E3M2", 6, {}}, Dtype{"F4", 4, {}},
};

const Dtype* find(std::string_view name) {
  const auto* found = std::ranges::find(kDtypes, name, &Dtype::name);
  return found == kDtypes.end() ? nullptr : found;
}

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(why); }

int64_t index_in(const json& number) {
  if (!number.is_number_unsigned() || number.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    refuse("a size or offset is no such number");
  return number.get<int64_t>();
}

Entry entry_from(const std::string& name, const json& value) {
  if (!value.is_object()) refuse(fmt::format("'{}' is no object", name));
  Entry entry{name, "", {}, 0, 0};
  for (const auto& [key, item] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") refuse(fmt::format("'{}' has an unknown '{}'", name, key));
    if (key == "dtype" ? !item.is_string() : !item.is_array()) refuse(fmt::format("the {} of '{}' is not of its type", key, name));
  }
  if (value.size() != 3) refuse(fmt::format("'{}' lacks dtype, shape or data_offsets", name));
  entry.dtype = value["dtype"].get<std::string>();
  const auto* dtype = find(entry.dtype);
  if (!dtype) refuse(fmt::format("'{}' has the unknown dtype '{}'", name, entry.dtype));
  int64_t bits = dtype->bits;
  for (const auto& size : value["shape"]) {
    entry.shape.push_back(index_in(size));
    if (__builtin_mul_overflow(bits, entry.shape.back(), &bits)) refuse(fmt::format("the sizes of '{}' overflow", name));
  }
  if (value["data_offsets"].size() != 2) refuse(fmt::format("'{}' has no two data_offsets", name));
  entry.begin = index_in(value["data_offsets"][0]);
  entry.end = index_in(value["data_offsets"][1]);
  if (bits % 8 != 0 || entry.end < entry.begin || entry.end - entry.begin != bits / 8)
    refuse(
        fmt::format("'{}' is {}[{}], and has the bytes {} to {}", name, entry.dtype, fmt::join(entry.shape, ", "), entry.begin, entry.end));
  return entry;
}

// nlohmann's parser takes the last of repeated keys; this one throws.
json parse_json(std::string_view text) {
  std::vector<std::set<std::string>> keys;
  return json::parse(text, [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    else if (event == json::parse_event_t::object_end) keys.pop_back();
    else if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      refuse(fmt::format("'{}' is there twice", value.get<std::string>()));
    return true;
  });
}

}  // namespace

std::optional<std::string> dtype_name(c10::ScalarType dtype) {
  for (const auto& each : kDtypes) {
    if (each.type == dtype) return std::string(each.name);
  }
  return {};
}

std::optional<c10::ScalarType> dtype_of(std::string_view name) {
  const auto* found = find(name);
  return found ? found->type : std::nullopt;
}

std::string header_text(const std::vector<Entry>& entries, const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + json(metadata).dump();
  for (const auto& entry : entries) {
    if (text.size() > 1) text += ",";
    text += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json(entry.name).dump(), entry.dtype,
                        fmt::join(entry.shape, ","), entry.begin, entry.end);
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + text;
}

int64_t header_size(const char (&first)[8], int64_t file_bytes) {
  uint64_t size = 0;
  std::memcpy(&size, first, sizeof size);
  if (size > kMostHeaderBytes) refuse(fmt::format("its header has {} bytes; expected at most {}", size, kMostHeaderBytes));
  if (static_cast<int64_t>(size) > file_bytes - 8) refuse(fmt::format("its header has {} bytes, and the file only {}", size, file_bytes));
  return static_cast<int64_t>(size);
}

Header parse(std::string_view text, int64_t file_bytes) {
  json all;
  try {
    all = parse_json(text);
  } catch (const json::exception& problem) {
    refuse(fmt::format("its header is no JSON: {}", problem.what()));
  }
  if (!all.is_object()) refuse("its header is no JSON object");
  Header header;
  header.data_begin = 8 + static_cast<int64_t>(text.size());
  for (const auto& [name, value] : all.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(entry_from(name, value));
      continue;
    }
    if (!value.is_object()) refuse("__metadata__ is no object");
    for (const auto& [key, item] : value.items()) {
      if (!item.is_string()) refuse(fmt::format("__metadata__ has a '{}' that is no text", key));
      header.metadata[key] = item.get<std::string>();
    }
  }
  std::ranges::stable_sort(header.entries,
                           [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t end = 0;
  for (const auto& entry : header.entries) {
    if (entry.begin != end) refuse(fmt::format("'{}' begins at byte {} of the data; expected {}", entry.name, entry.begin, end));
    end = entry.end;
  }
  if (end != file_bytes - header.data_begin)
    refuse(fmt::format("the file has {} bytes; expected {} by its header", file_bytes, header.data_begin + end));
  return header;
}

Header read_header(const std::string& path) {
  try {
    std::ifstream file(path, std::ios::binary);
    if (!file) refuse("it cannot be opened");
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path));
    char first[8];
    if (!file.read(first, sizeof first)) refuse("it has fewer than 8 bytes");
    std::string text(static_cast<size_t>(header_size(first, bytes)), '\0');
    if (!file.read(text.data(), static_cast<std::streamsize>(text.size()))) refuse("it ends within its header");
    return parse(text, bytes);
  } catch (const std::exception& problem) {
    throw std::runtime_error(fmt::format("'{}' is no safetensors file: {}", path, problem.what()));
  }
}

}  // namespace dtensor::checkpoints::safetensors
