// The text of an index. Its first line is fixed but for the checksum of all that follows, so no bit of it can change unnoticed.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/index_text.hpp"
#include "src/checkpoint/safetensors.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/checkpoint/index.hpp>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>

namespace dtensor::checkpoints {

namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr const char* kFormat = "dtensor-checkpoint";
constexpr int64_t kLeastChunk = int64_t{1} << 12, kMostChunk = int64_t{1} << 30;
constexpr int64_t kMostHeader = 100'000'008;  // of a safetensors file, with the length before it

std::string first_line(uint32_t sum) { return fmt::format("{{\"crc32c\": \"{:08x}\",\n", sum); }

// JSON has no numbers that are not finite.
json to_json(double number) { return std::isfinite(number) ? json(number) : json{{"double", fmt::format("{}", number)}}; }

double double_from(const json& value) {
  if (value.is_number()) return value.get<double>();
  const auto text = value.at("double").get<std::string>();
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  return text == "-nan" ? -std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::quiet_NaN();
}

bool is_utf8(const std::string& text) {
  try {
    json(text).dump();
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

// JSON has no texts that are not UTF-8: {"bytes": "ff0a"}.
json to_json(const std::string& text) {
  if (is_utf8(text)) return text;
  return {{"bytes", fmt::format("{:02x}", fmt::join(std::vector<uint8_t>(text.begin(), text.end()), ""))}};
}

std::string text_from(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  const auto digits = value.at("bytes").get<std::string>();
  std::string text;
  for (size_t i = 0; i < digits.size(); i += 2) {
    const auto *begin = digits.data() + i, *end = digits.data() + std::min(i + 2, digits.size());
    uint8_t byte = 0;
    const auto [rest, error] = std::from_chars(begin, end, byte, 16);
    if (error != std::errc() || rest != begin + 2) throw std::runtime_error("the bytes of a text are no hexadecimal numbers of two digits");
    text += static_cast<char>(byte);
  }
  return text;
}

json to_json(const Value& value) {
  return std::visit(
      [](const auto& held) -> json {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, double>) {
          return {{"double", to_json(held)}};
        } else if constexpr (std::is_same_v<T, std::vector<double>>) {
          json list = json::array();
          for (const double number : held) list.push_back(to_json(number));
          return {{"doubles", list}};
        } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
          return {{"ints", held}};
        } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          json list = json::array();
          for (const auto& text : held) list.push_back(to_json(text));
          return {{"texts", list}};
        } else if constexpr (std::is_same_v<T, std::string>) {
          return to_json(held);
        } else {
          return held;
        }
      },
      value);
}

Value value_from(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_string() || (value.size() == 1 && value.contains("bytes"))) return text_from(value);
  if (value.size() == 1 && value.contains("double")) return double_from(value["double"]);
  if (value.size() == 1 && value.contains("ints")) return value["ints"].get<std::vector<int64_t>>();
  if (value.size() == 1 && value.contains("texts")) {
    std::vector<std::string> texts;
    for (const auto& text : value["texts"]) texts.push_back(text_from(text));
    return texts;
  }
  if (value.size() != 1 || !value.contains("doubles")) throw std::runtime_error("a value is of no known kind");
  std::vector<double> numbers;
  for (const auto& number : value["doubles"]) numbers.push_back(double_from(number));
  return numbers;
}

json to_json(const Piece& piece) {
  json begin = json::array(), sizes = json::array();
  for (const auto& side : piece.box) {
    begin.push_back(side.begin);
    sizes.push_back(side.length());
  }
  return {{"begin", begin}, {"sizes", sizes}, {"file", piece.file}, {"offset", piece.offset}, {"crc32c", piece.sums}};
}

Piece piece_from(const json& value) {
  Piece piece;
  const auto begin = value.at("begin").get<std::vector<int64_t>>(), sizes = value.at("sizes").get<std::vector<int64_t>>();
  if (begin.size() != sizes.size()) throw std::runtime_error("a piece has a corner of another number of dims than sizes");
  for (const auto& [from, length] : ranges::views::zip(begin, sizes)) {
    if (from < 0 || length < 0 || from > std::numeric_limits<int64_t>::max() - length) throw std::runtime_error("a piece is out of range");
    piece.box.push_back({from, from + length});
  }
  piece.file = value.at("file").get<int32_t>();
  piece.offset = value.at("offset").get<int64_t>();
  piece.sums = value.at("crc32c").get<std::vector<uint32_t>>();
  return piece;
}

// The name of a dtype in an index: that of safetensors, or for complex numbers of two doubles one of ours.
std::string name_of(c10::ScalarType dtype) {
  const auto name = safetensors::dtype_name(dtype);
  if (name) return *name;
  if (dtype == c10::kComplexDouble) return "C128";
  if (dtype == c10::kComplexHalf) return "C32";
  throw std::runtime_error(fmt::format("the dtype {} cannot be saved", c10::toString(dtype)));
}

c10::ScalarType dtype_from(const std::string& name) {
  if (name == "C128") return c10::kComplexDouble;
  if (name == "C32") return c10::kComplexHalf;
  const auto dtype = safetensors::dtype_of(name);
  if (!dtype) throw std::runtime_error(fmt::format("the dtype {} is not known", name));
  return *dtype;
}

bool overlap(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.size(); ++d) {
    if (a[d].end <= b[d].begin || b[d].end <= a[d].begin) return false;
  }
  return true;
}

// Compares only boxes that lie side by side in the dim in which most of them begin at places of their own.
bool overlap_anywhere(std::vector<const Box*>& boxes) {
  if (boxes.size() < 2) return false;
  if (boxes.front()->empty()) return true;  // two of a tensor of no dims
  size_t dim = 0, most = 0;
  for (size_t d = 0; d < boxes.front()->size(); ++d) {
    std::set<int64_t> begins;
    for (const auto* box : boxes) begins.insert((*box)[d].begin);
    if (begins.size() > most) dim = d, most = begins.size();
  }
  std::ranges::sort(boxes, {}, [dim](const Box* box) { return (*box)[dim].begin; });
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = i + 1; j < boxes.size() && (*boxes[j])[dim].begin < (*boxes[i])[dim].end; ++j) {
      if (overlap(*boxes[i], *boxes[j])) return true;
    }
  }
  return false;
}

// Throws unless the pieces are the tensor: each in its bounds and its file, none overlapping, nothing left out.
void check(const std::string& name, const SavedTensor& tensor, const Index& index, bool is_part) {
  const auto wrong = [&](const std::string& what) { throw std::runtime_error(fmt::format("tensor '{}' {}", name, what)); };
  int64_t numel = 1;
  for (const auto size : tensor.sizes) {
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel)) wrong(fmt::format("has sizes [{}]", fmt::join(tensor.sizes, ", ")));
  }
  const auto item = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  if (numel > std::numeric_limits<int64_t>::max() / item) wrong("is too large");
  int64_t covered = 0;
  std::vector<const Box*> boxes;
  for (const auto& piece : tensor.pieces) {
    if (piece.box.size() != tensor.sizes.size()) wrong("has a piece of another number of dims");
    for (const auto& [side, size] : ranges::views::zip(piece.box, tensor.sizes)) {
      if (side.end > size) wrong(fmt::format("has a piece outside of its sizes [{}]", fmt::join(tensor.sizes, ", ")));
    }
    const auto bytes = numel_of(piece.box) * item;
    if (is_part && piece.file < 0) continue;
    if (piece.file < 0 || piece.file >= static_cast<int32_t>(index.files.size())) wrong("has a piece in no file");
    const auto& file = index.files[static_cast<size_t>(piece.file)];
    if (piece.offset < 0 || (file.bytes >= 0 && (piece.offset > file.bytes || bytes > file.bytes - piece.offset)))
      wrong(fmt::format("has a piece beyond the end of {}", file.name));
    const auto chunks = bytes / index.chunk_bytes + (bytes % index.chunk_bytes > 0 ? 1 : 0);
    if (!piece.sums.empty() && static_cast<int64_t>(piece.sums.size()) != chunks)
      wrong(fmt::format("has {} checksums for {} bytes", piece.sums.size(), bytes));
    if (__builtin_add_overflow(covered, numel_of(piece.box), &covered)) wrong("has pieces that are too large together");
    if (numel_of(piece.box) > 0) boxes.push_back(&piece.box);
  }
  if (covered != numel && !is_part) wrong(fmt::format("has {} elements in pieces of {}", numel, covered));
  if (overlap_anywhere(boxes)) wrong("has pieces that overlap");
}

void check_file_name(const std::string& name) {
  const bool inside =
      !name.empty() && name.front() != '/' && name.find('\0') == name.npos && ("/" + name + "/").find("/../") == std::string::npos;
  if (!inside) throw std::runtime_error(fmt::format("the name '{}' is of a file outside of the folder", name));
}

SavedFile file_from(const json& value) {
  SavedFile file{text_from(value.at("name")), value.at("bytes").get<int64_t>(), value.at("header_bytes").get<int64_t>(),
                 value.at("header_crc32c").get<uint32_t>()};
  check_file_name(file.name);
  if (file.bytes < 0 || file.header_bytes < 0 || file.header_bytes > std::min(file.bytes, kMostHeader))
    throw std::runtime_error(fmt::format("'{}' is said to have {} bytes, {} of them of its header; expected at most {}", file.name,
                                         file.bytes, file.header_bytes, kMostHeader));
  return file;
}

// Throws where pieces have more bytes together than their files. Since open_file() compares files with what the index says of them, an
// index asks for no more memory than there are bytes on the disk.
void check_bytes(const Index& index) {
  std::vector<int64_t> left;
  int64_t all = 0;
  for (const auto& file : index.files) {
    if (__builtin_add_overflow(all, file.bytes, &all)) throw std::runtime_error("its files are too large together");
    left.push_back(file.bytes - file.header_bytes);
  }
  for (const auto& [name, tensor] : index.tensors) {
    for (const auto& piece : tensor.pieces) {
      if (piece.file < 0) continue;
      const auto number = static_cast<size_t>(piece.file);
      left[number] -= numel_of(piece.box) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
      if (left[number] < 0) throw std::runtime_error(fmt::format("'{}' has fewer bytes than its pieces", index.files[number].name));
    }
  }
}

Index parse(const std::string& text, bool is_part) {
  const auto all = json::parse(text);
  if (all.at("format") != kFormat) throw std::runtime_error("it is not the index of a checkpoint");
  if (const auto& version = all.at("version"); version != kVersion)
    throw std::runtime_error(fmt::format(
        "it is of version {} of the format; expected {}; hint: take the dtensor that wrote it, or a later one", version.dump(), kVersion));
  Index index;
  index.step = all.at("step").get<int64_t>();
  index.attempt = all.at("attempt").get<std::string>();
  for (const auto& [key, value] : all.at("writer").items()) index.writer[key] = text_from(value);
  index.chunk_bytes = all.at("chunk_bytes").get<int64_t>();
  if (index.chunk_bytes < kLeastChunk || index.chunk_bytes > kMostChunk || index.chunk_bytes % 16 != 0)
    throw std::runtime_error(fmt::format("chunk_bytes is {}; expected a multiple of 16 from {} to {}", index.chunk_bytes, kLeastChunk,
                                         kMostChunk));
  for (const auto& file : all.at("files")) index.files.push_back(file_from(file));
  for (const auto& [name, value] : all.at("tensors").items()) {
    SavedTensor tensor{dtype_from(value.at("dtype").get<std::string>()), value.at("sizes").get<std::vector<int64_t>>(), {}};
    for (const auto& piece : value.at("pieces")) tensor.pieces.push_back(piece_from(piece));
    check(name, tensor, index, is_part);
    index.tensors.emplace(name, std::move(tensor));
  }
  check_bytes(index);
  index.same_as = all.at("same_as").get<std::map<std::string, std::string>>();
  for (const auto& [name, other] : index.same_as) {
    if (!is_part && !index.tensors.contains(other))
      throw std::runtime_error(fmt::format("'{}' is said to be '{}', which is not there", name, other));
  }
  for (const auto& [name, value] : all.at("values").items()) index.values[name] = value_from(value);
  return index;
}

}  // namespace

int64_t numel_of(const Box& box) {
  int64_t numel = 1;
  for (const auto& side : box) numel *= side.length();
  return numel;
}

int64_t SavedTensor::numel() const {
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return numel;
}

int64_t SavedTensor::bytes() const { return numel() * static_cast<int64_t>(c10::elementSize(dtype)); }

const SavedTensor* Index::find(const std::string& name) const {
  const auto alias = same_as.find(name);
  const auto found = tensors.find(alias == same_as.end() ? name : alias->second);
  return found == tensors.end() ? nullptr : &found->second;
}

int64_t Index::bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.bytes();
  return bytes;
}

std::string text_of(const Value& value) {
  return std::visit(
      [](const auto& held) {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, bool> || std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) return fmt::format("{}", held);
        else return fmt::format("[{}]", fmt::join(held, ", "));
      },
      value);
}

std::string kind_of(const Value& value) {
  return std::visit(
      [](const auto& held) -> std::string {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_integral_v<T>) return std::is_same_v<T, bool> ? "a bool" : "an integer";
        else if constexpr (std::is_same_v<T, double>) return "a floating-point number";
        else if constexpr (std::is_same_v<T, std::string>) return "a text";
        else if constexpr (std::is_same_v<T, std::vector<int64_t>>) return "a list of integers";
        else if constexpr (std::is_same_v<T, std::vector<double>>) return "a list of floating-point numbers";
        else return "a list of texts";
      },
      value);
}

// Names are keys of JSON objects, which are UTF-8.
static const std::string& checked_name(const std::string& name) {
  if (is_utf8(name)) return name;
  throw std::runtime_error(fmt::format("the name {} is not UTF-8; hint: a value may be any text, a name may not",
                                       json(name).dump(-1, ' ', true, json::error_handler_t::replace)));
}

std::string to_text(const Index& index) {
  json files = json::array(), tensors = json::object(), values = json::object(), writer = json::object(), same_as = json::object();
  for (const auto& file : index.files)
    files.push_back({{"name", to_json(file.name)},
                     {"bytes", file.bytes},
                     {"header_bytes", file.header_bytes},
                     {"header_crc32c", file.header_sum}});
  for (const auto& [name, tensor] : index.tensors) {
    json pieces = json::array();
    for (const auto& piece : tensor.pieces) pieces.push_back(to_json(piece));
    tensors[checked_name(name)] = {{"dtype", name_of(tensor.dtype)}, {"sizes", tensor.sizes}, {"pieces", std::move(pieces)}};
  }
  for (const auto& [name, other] : index.same_as) same_as[checked_name(name)] = checked_name(other);
  for (const auto& [name, value] : index.values) values[checked_name(name)] = to_json(value);
  for (const auto& [name, text] : index.writer) writer[checked_name(name)] = to_json(text);
  const json all{{"format", kFormat},          {"version", kVersion},           {"step", index.step},
                 {"attempt", index.attempt},   {"writer", std::move(writer)},   {"chunk_bytes", index.chunk_bytes},
                 {"files", std::move(files)},  {"tensors", std::move(tensors)}, {"same_as", std::move(same_as)},
                 {"values", std::move(values)}};
  const auto rest = all.dump().substr(1) + "\n";  // its '{' is in the first line
  return first_line(crc32c(rest.data(), rest.size())) + rest;
}

static Index index_from(const std::string& text, const std::string& path, bool is_part) {
  const auto line = first_line(0).size();
  if (text.size() < line || text.substr(0, line) != first_line(crc32c(text.data() + line, text.size() - line))) {
    fail("load",
         "'{}' is damaged, or no index of a checkpoint: its checksum is not that of its {} bytes; hint: it was cut, or changed on its "
         "way here; copy it again, or load an earlier step",
         path, text.size());
  }
  try {
    return parse(text, is_part);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& problem) {
    fail("load", "the index '{}' cannot be read: {}", path, problem.what());
  }
}

Index index_from(const std::string& text, const std::string& path) { return index_from(text, path, false); }
Index part_of_index_from(const std::string& text, const std::string& path) { return index_from(text, path, true); }

void check_tensors(const Index& index) {
  for (const auto& [name, tensor] : index.tensors) check(name, tensor, index, false);
}

Index read_index(const std::string& step_folder) {
  const auto path = step_folder + "/" + kIndexName;
  std::string text;
  try {
    text = disk::read_text(path);
  } catch (const std::exception& problem) {
    fail("load", "'{}' is no complete step of a checkpoint: {}; hint: dtensor-checkpoint list shows the steps that there are", step_folder,
         problem.what());
  }
  auto index = index_from(text, path);
  index.folder = step_folder;
  return index;
}

}  // namespace dtensor::checkpoints
