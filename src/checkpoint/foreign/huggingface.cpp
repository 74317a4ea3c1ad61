// Hugging Face's model folders: safetensors files, and the index of which tensor is in which.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/foreign/common.hpp"
#include "src/checkpoint/index_text.hpp"
#include "src/checkpoint/safetensors.hpp"

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>

namespace dtensor::checkpoints {

namespace {

using foreign::Skipped;
using nlohmann::json;

constexpr const char* kOneFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kReadHint = "the file was cut on its way here, or another program made it otherwise; copy it again";

// Which file has which tensor.
std::map<std::string, std::set<std::string>> names_by_file(const std::string& path) {
  std::map<std::string, std::set<std::string>> files;
  const auto all = json::parse(disk::read_text(path));
  const auto* map = all.is_object() && all.contains("weight_map") ? &all["weight_map"] : nullptr;
  if (!map || !map->is_object()) throw std::runtime_error(fmt::format("'{}' has no object weight_map", path));
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string()) throw std::runtime_error(fmt::format("'{}' gives no file for '{}'", path, name));
    const auto text = file.get<std::string>();
    if (text.empty() || text.find('/') != text.npos || text.find('\0') != text.npos || text == "..")
      throw std::runtime_error(fmt::format("'{}' has '{}' in '{}', which is no file of the folder", path, name, text));
    files[text].insert(name);
  }
  return files;
}

struct Folder {
  Index index;
  Skipped skipped;

  // `wanted`: the names that the index file gives for it; null: there is none.
  void add(const std::string& file, const std::set<std::string>* wanted) {
    const auto path = index.folder + "/" + file;
    const auto header = safetensors::read_header(path);
    const auto number = static_cast<int32_t>(index.files.size());
    index.files.push_back({file, static_cast<int64_t>(std::filesystem::file_size(path)), 0, 0});
    std::set<std::string> found;
    for (const auto& entry : header.entries) {
      if (wanted && !wanted->contains(entry.name)) {
        skipped.add(entry.name, "not in the index");
        continue;
      }
      found.insert(entry.name);
      add(entry, number, header.data_begin);
    }
    const auto tensors = found;
    for (const auto& [name, other] : header.metadata) {
      if (!tensors.contains(other) || index.tensors.contains(name)) continue;
      index.same_as[name] = other;
      found.insert(name);
    }
    if (!wanted) return;
    for (const auto& name : *wanted) {
      if (!found.contains(name)) throw std::runtime_error(fmt::format("'{}' has no '{}', which the index says", path, name));
    }
  }

  void add(const safetensors::Entry& entry, int32_t file, int64_t data_begin) {
    const auto dtype = safetensors::dtype_of(entry.dtype);
    if (!dtype) throw std::runtime_error(fmt::format("'{}' is of {}, a dtype that this libtorch lacks", entry.name, entry.dtype));
    SavedTensor tensor{*dtype, entry.shape, {}};
    Piece piece;
    for (const auto size : entry.shape) piece.box.push_back({0, size});
    piece.file = file;
    piece.offset = data_begin + entry.begin;
    tensor.pieces.push_back(std::move(piece));
    if (!index.tensors.emplace(entry.name, std::move(tensor)).second)
      throw std::runtime_error(fmt::format("'{}' is in two files", entry.name));
  }
};

Index read(const std::string& path) {
  Folder folder;
  const std::filesystem::path as_path(path);
  if (!std::filesystem::is_directory(as_path)) {
    const auto above = as_path.parent_path().string();
    folder.index.folder = above.empty() ? "." : above;
    folder.add(as_path.filename().string(), nullptr);
  } else {
    folder.index.folder = path;
    if (disk::exists(path + "/" + kIndexFile)) {
      for (const auto& [file, names] : names_by_file(path + "/" + kIndexFile)) folder.add(file, &names);
    } else if (disk::exists(path + "/" + kOneFile)) {
      folder.add(kOneFile, nullptr);
    } else {
      throw std::runtime_error(fmt::format("it has neither {} nor {}", kOneFile, kIndexFile));
    }
  }
  std::erase_if(folder.index.same_as, [&](const auto& pair) { return folder.index.tensors.contains(pair.first); });
  folder.index.writer["format"] = "huggingface";
  folder.skipped.note_in(folder.index);
  check_tensors(folder.index);
  return std::move(folder.index);
}

// -- Writing ----------------------------------------------------------------------------------------------------------------

using Described = Source::Described;

int64_t bytes_of(const Described& tensor) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const auto size : tensor.sizes) bytes *= size;
  return bytes;
}

std::vector<std::vector<const Described*>> shared_out(const Source& source, int64_t file_bytes) {
  std::vector<std::vector<const Described*>> files(1);
  int64_t filled = 0;
  for (const auto& tensor : source.tensors) {
    const auto bytes = bytes_of(tensor);
    if (!files.back().empty() && bytes > file_bytes - filled) files.emplace_back(), filled = 0;
    files.back().push_back(&tensor);
    filled += bytes;
  }
  for (auto& file : files) {  // large items first, so that all are aligned
    std::ranges::sort(file, [](const auto* a, const auto* b) {
      return std::pair(-static_cast<int64_t>(c10::elementSize(a->dtype)), a->name) <
             std::pair(-static_cast<int64_t>(c10::elementSize(b->dtype)), b->name);
    });
  }
  return files;
}

void write_file(const std::string& path, const Source& source, const std::vector<const Described*>& tensors) {
  std::map<std::string, std::string> metadata{{"format", "pt"}};
  std::set<std::string> names;
  std::vector<safetensors::Entry> entries;
  int64_t at = 0;
  for (const auto* tensor : tensors) {
    const auto dtype = safetensors::dtype_name(tensor->dtype);
    if (!dtype) throw std::runtime_error(fmt::format("'{}' is of {}, which safetensors lacks", tensor->name, c10::toString(tensor->dtype)));
    if (tensor->name == "__metadata__") throw std::runtime_error("no tensor may be called __metadata__");
    entries.push_back({tensor->name, *dtype, tensor->sizes, at, at + bytes_of(*tensor)});
    at = entries.back().end;
    names.insert(tensor->name);
  }
  for (const auto& [name, other] : source.same_as) {
    if (names.contains(other) && name != "format") metadata[name] = other;
  }
  disk::NewFile file(path);
  const auto header = safetensors::header_text(entries, metadata);
  file.write(header.data(), header.size());
  for (const auto* tensor : tensors) {
    const auto data = foreign::whole(source, *tensor);
    file.write(data.data_ptr(), static_cast<size_t>(bytes_of(*tensor)));
  }
  file.finish();
}

void put(const std::string& path, const std::string& text) {
  disk::NewFile file(path);
  file.write(text.data(), text.size());
  file.finish();
}

void write(const std::string& path, const Source& source, const HuggingFaceOptions& options) {
  if (options.file_bytes < 1) throw std::runtime_error(fmt::format("file_bytes is {}; expected at least 1", options.file_bytes));
  foreign::check_source(source);
  foreign::NewFolder folder(path);
  const auto files = shared_out(source, options.file_bytes);
  json map = json::object();
  int64_t total = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const auto name = files.size() == 1 ? std::string(kOneFile) : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    write_file(folder.file(name), source, files[i]);
    for (const auto* tensor : files[i]) map[tensor->name] = name, total += bytes_of(*tensor);
  }
  if (files.size() > 1) put(folder.file(kIndexFile), json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n");
  if (!options.config.empty()) put(folder.file("config.json"), options.config);
  folder.finish();
}

}  // namespace

Index read_huggingface(const std::string& path) {
  return foreign::guarded("read_huggingface", path, kReadHint, [&] { return read(path); });
}

void write_huggingface(const std::string& folder, const Source& source, const HuggingFaceOptions& options) {
  foreign::guarded("write_huggingface", folder, "nothing was written; give the name of a folder that is not there", [&] {
    write(folder, source, options);
    return 0;
  });
}

}  // namespace dtensor::checkpoints
