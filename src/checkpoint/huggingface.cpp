// Hugging Face's folders of safetensors files.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/safetensors.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <set>

namespace dtensor::checkpoints {

namespace {

constexpr const char* kOneFile = "model.safetensors";
constexpr const char* kList = "model.safetensors.index.json";

// The names of the files of a folder: that of the one file, or of those that the list names.
std::vector<std::string> files_in(const std::string& folder) {
  const auto list = folder + "/" + kList;
  if (!disk::exists(list)) {
    require(disk::exists(folder + "/" + kOneFile), "read_huggingface", "'{}' has neither {} nor {}", folder, kOneFile, kList);
    return {kOneFile};
  }
  const auto json = nlohmann::json::parse(disk::read_text(list), nullptr, /*allow_exceptions=*/false);
  const bool well = json.is_object() && json.contains("weight_map") && json["weight_map"].is_object();
  require(well, "read_huggingface", "'{}' is no list of weights: it has no \"weight_map\"", list);
  std::set<std::string> names;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    require(file.is_string() && file.get<std::string>().find('/') == std::string::npos && file.get<std::string>() != "..",
            "read_huggingface", "'{}' names no file of its folder for '{}'", list, tensor);
    names.insert(file.get<std::string>());
  }
  return {names.begin(), names.end()};
}

void add_file(Index& index, const std::string& name) {
  const auto path = index.folder + "/" + name;
  safetensors::Header header;
  try {
    header = safetensors::read_header(path);
  } catch (const std::exception& problem) {
    fail("read_huggingface", "{}", problem.what());
  }
  const auto number = static_cast<int32_t>(index.files.size());
  index.files.push_back({name, -1, 0, 0});
  for (const auto& entry : header.entries) {
    const auto dtype = safetensors::dtype_of(entry.dtype);
    require(dtype.has_value(), "read_huggingface", "'{}' in '{}' is {}, which this libtorch has not", entry.name, path, entry.dtype);
    Piece piece{{}, number, header.data_begin + entry.begin, {}};
    for (const auto size : entry.shape) piece.box.push_back({0, size});
    const bool is_new = index.tensors.try_emplace(entry.name, SavedTensor{*dtype, entry.shape, {std::move(piece)}}).second;
    require(is_new, "read_huggingface", "'{}' is in several files of '{}'", entry.name, index.folder);
  }
}

// Which tensors go into which file: as many as fit, at least one.
std::vector<std::vector<const std::pair<std::string, SavedTensor>*>> shared_out(
    const std::vector<std::pair<std::string, SavedTensor>>& tensors, int64_t file_bytes) {
  std::vector<std::vector<const std::pair<std::string, SavedTensor>*>> files(1);
  int64_t bytes = 0;
  for (const auto& entry : tensors) {
    if (!files.back().empty() && bytes + entry.second.bytes() > file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(&entry);
    bytes += entry.second.bytes();
  }
  return files;
}

}  // namespace

Index read_huggingface(const std::string& path) {
  Index index;
  const bool is_folder = std::filesystem::is_directory(path);
  const auto above = std::filesystem::path(path).parent_path().string();
  index.folder = is_folder ? path : above.empty() ? "." : above;
  for (const auto& name : is_folder ? files_in(path) : std::vector<std::string>{std::filesystem::path(path).filename().string()})
    add_file(index, name);
  return index;
}

void write_huggingface(const std::string& folder, const std::vector<std::pair<std::string, SavedTensor>>& tensors,
                       const std::function<at::Tensor(const std::string& name)>& tensor, int64_t file_bytes) {
  try {
    disk::make_folder(folder);
    require(disk::names_in(folder).empty(), "write_huggingface", "'{}' has files; expected a new or empty folder", folder);
    const auto files = shared_out(tensors, file_bytes);
    nlohmann::json list{{"metadata", {{"total_size", 0}}}, {"weight_map", nlohmann::json::object()}};
    int64_t total = 0;
    for (size_t f = 0; f < files.size(); ++f) {
      const auto name = files.size() == 1 ? kOneFile : fmt::format("model-{:05}-of-{:05}.safetensors", f + 1, files.size());
      std::vector<safetensors::Entry> entries;
      int64_t bytes = 0;
      for (const auto* entry : files[f]) {
        const auto dtype = safetensors::dtype_name(entry->second.dtype);
        require(dtype.has_value(), "write_huggingface", "'{}' is {}, which the format has not", entry->first,
                c10::toString(entry->second.dtype));
        entries.push_back({entry->first, *dtype, entry->second.sizes, bytes, bytes + entry->second.bytes()});
        bytes += entry->second.bytes();
        list["weight_map"][entry->first] = name;
      }
      total += bytes;
      disk::NewFile out(folder + "/" + name);
      const auto header = safetensors::header_text(entries, {{"format", "pt"}});
      out.write(header.data(), header.size());
      for (const auto* entry : files[f]) {
        const auto value = tensor(entry->first).contiguous();
        out.write(value.data_ptr(), static_cast<size_t>(entry->second.bytes()));
      }
      out.finish();
    }
    list["metadata"]["total_size"] = total;
    if (files.size() > 1) disk::replace(folder + "/" + kList, list.dump(2) + "\n");
  } catch (const Error&) {
    throw;
  } catch (const std::exception& problem) {
    fail("write_huggingface", "{}", problem.what());
  }
}

}  // namespace dtensor::checkpoints
