// Reads the files of torch.save.
#include "src/checkpoint/foreign/common.hpp"
#include "src/checkpoint/foreign/torch_values.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

namespace dtensor::checkpoints {

namespace {

using foreign::TorchTensor;

constexpr const char* kHint =
    "save a dict of tensors, numbers and texts, such as model.state_dict(); a file that was cut must be copied again";

struct HashOf {
  size_t operator()(const TorchTensor& tensor) const {
    auto hash = std::hash<std::string_view>()(tensor.storage) ^ static_cast<size_t>(tensor.offset);
    for (const auto size : tensor.sizes) hash = hash * 31 + static_cast<size_t>(size);
    return hash;
  }
};

void check_is_zip(const disk::File& file) {
  char first[4] = {};
  if (file.size() < 4) throw std::runtime_error("it is too short for a file of torch.save");
  file.read(first, sizeof first, 0);
  if (std::memcmp(first, "PK\3\4", 4) == 0) return;
  if (first[0] == '\x80')
    throw std::runtime_error("it is a bare pickle, or of torch.save before PyTorch 1.6; load it there and save it again");
  throw std::runtime_error("it is no zip archive, which the files of torch.save are");
}

Index read(const std::string& path) {
  Index index;
  const std::filesystem::path as_path(path);
  index.folder = as_path.has_parent_path() ? as_path.parent_path().string() : ".";
  const disk::File file(path);
  index.files.push_back({as_path.filename().string(), file.size(), 0, 0});
  index.writer["format"] = "torch.save";
  check_is_zip(file);
  const foreign::TorchArchive archive(file, 0, file.size());
  foreign::Skipped skipped;
  foreign::Budget budget(file.size());
  std::unordered_map<TorchTensor, std::string, HashOf> known;
  foreign::Flattening all(index, skipped, budget, [&](const std::string& name, const pickle::Value& value) {
    if (index.tensors.contains(name) || index.same_as.contains(name) || index.values.contains(name))
      throw std::runtime_error(fmt::format("two things in it are called '{}'", name));
    try {
      const auto tensor = foreign::tensor_from(value);
      const auto [first, is_new] = known.emplace(tensor, name);
      if (is_new) {
        index.tensors.emplace(name, archive.saved(tensor, 0, budget));
      } else {
        budget.spend(first->second.size());
        index.same_as.emplace(name, first->second);
      }
    } catch (const std::exception& problem) {
      throw std::runtime_error(fmt::format("tensor '{}': {}", name, problem.what()));
    }
  });
  all.add("", archive.root());
  skipped.note_in(index);
  return index;
}

}  // namespace

Index read_torch_file(const std::string& path) {
  return foreign::guarded("read_torch_file", path, kHint, [&] { return read(path); });
}

}  // namespace dtensor::checkpoints
