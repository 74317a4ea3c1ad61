#include "src/checkpoint/foreign/common.hpp"

#include "src/checkpoint/disk.hpp"

#include <dtensor/checkpoint/read.hpp>

#include <fmt/ranges.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <system_error>

#include <sys/stat.h>
#include <unistd.h>

namespace dtensor::checkpoints {

namespace foreign {

void Skipped::add(const std::string& name, const std::string& why) {
  constexpr int64_t kMostNamed = 20;
  if (++count_ <= kMostNamed) text_ += fmt::format("{}{} ({})", count_ == 1 ? "" : ", ", name, why);
}

void Skipped::note_in(Index& index) const {
  if (count_ > 0) index.writer["skipped"] = fmt::format("{}: {}", count_, text_);
}

at::Tensor whole(const Source& source, const Source::Described& tensor) {
  const auto given = source.get(tensor.name);
  if (!given.defined()) throw std::runtime_error(fmt::format("the source gave no tensor '{}'", tensor.name));
  if (given.scalar_type() != tensor.dtype || given.sizes() != at::IntArrayRef(tensor.sizes)) {
    throw std::runtime_error(fmt::format("the source gave '{}' as {}[{}]; expected {}[{}]", tensor.name, c10::toString(given.scalar_type()),
                                         fmt::join(given.sizes(), ", "), c10::toString(tensor.dtype), fmt::join(tensor.sizes, ", ")));
  }
  if (!given.is_cpu() || given.layout() != at::kStrided)
    throw std::runtime_error(fmt::format("the source gave '{}', which is not a dense tensor in host memory", tensor.name));
  return given.detach().resolve_conj().resolve_neg().contiguous();
}

void check_source(const Source& source) {
  std::set<std::string> names;
  const auto add = [&](const std::string& name) {
    if (name.empty() || !names.insert(name).second) throw std::runtime_error(fmt::format("the name '{}' is empty or there twice", name));
  };
  for (const auto& tensor : source.tensors) add(tensor.name);
  const auto tensors = names;
  for (const auto& [name, other] : source.same_as) {
    if (!tensors.contains(other)) throw std::runtime_error(fmt::format("'{}' is said to be '{}', which is not there", name, other));
    add(name);
  }
  for (const auto& [name, value] : source.values) add(name);
}

std::string hidden_name(const std::string& path) {
  static std::atomic<int> number{0};
  return fmt::format("{}.part-{}-{}", path, getpid(), number++);
}

NewFolder::NewFolder(std::string path) : path_(std::move(path)) {
  if (path_.empty()) throw std::runtime_error("the name of the folder is empty");
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  check_is_free();
  const auto above = disk::folder_of(path_);
  changed_ = disk::make_folder(above);
  changed_.insert(changed_.begin(), above);
  auto hidden = hidden_name(path_);
  for (; mkdir(hidden.c_str(), 0777) != 0; hidden = hidden_name(path_)) {
    if (errno != EEXIST) throw std::runtime_error(fmt::format("'{}' cannot be made: {}", hidden, std::generic_category().message(errno)));
  }
  hidden_ = hidden;
}

void NewFolder::check_is_free() const {
  if (!disk::exists(path_)) return;
  if (!std::filesystem::is_directory(path_)) throw std::runtime_error("it is a file; expected a new or empty folder");
  if (!disk::names_in(path_).empty()) throw std::runtime_error("it has files; expected a new or empty folder");
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!hidden_.empty()) std::filesystem::remove_all(hidden_, ignored);
}

void NewFolder::finish() {
  disk::sync_folder(hidden_);
  check_is_free();
  std::filesystem::rename(hidden_, path_);
  hidden_.clear();
  for (const auto& folder : changed_) disk::sync_folder(folder);
}

}  // namespace foreign

Source source_of(const Index& index) {
  Source source;
  for (const auto& [name, tensor] : index.tensors) source.tensors.push_back({name, tensor.dtype, tensor.sizes});
  source.get = [index](const std::string& name) { return read_tensor(index, name); };
  source.same_as = index.same_as;
  source.values = index.values;
  return source;
}

Source source_of(const std::map<std::string, at::Tensor>& tensors) {
  Source source;
  for (const auto& [name, tensor] : tensors) source.tensors.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  source.get = [tensors](const std::string& name) { return tensors.at(name); };
  return source;
}

}  // namespace dtensor::checkpoints
