#include "src/checkpoint/crc32c.hpp"
#include "src/checkpoint/disk.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/read.hpp>
#include <dtensor/parallel/patterns.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>

namespace dtensor::checkpoints {

namespace {

// Reads a piece and compares its checksums. Throws std::runtime_error.
std::string read_piece(const Index& index, const SavedTensor& tensor, const Piece& piece, const disk::File& file) {
  std::string bytes(static_cast<size_t>(numel_of(piece.box)) * c10::elementSize(tensor.dtype), '\0');
  file.read(bytes.data(), bytes.size(), piece.offset);
  for (size_t i = 0; i < piece.sums.size(); ++i) {
    const auto chunk = static_cast<size_t>(index.chunk_bytes), begin = i * chunk, size = std::min(chunk, bytes.size() - begin);
    if (crc32c(bytes.data() + begin, size) != piece.sums[i])
      throw std::runtime_error(fmt::format("bytes {} to {} of '{}' are damaged: their checksum is another",
                                           piece.offset + static_cast<int64_t>(begin), piece.offset + static_cast<int64_t>(begin + size),
                                           index.path_of(piece)));
  }
  return bytes;
}

void check_file(const Index& index, const SavedFile& saved, const disk::File& file) {
  const auto path = index.folder + "/" + saved.name;
  if (saved.bytes >= 0 && file.size() != saved.bytes)
    throw std::runtime_error(fmt::format("'{}' has {} bytes; expected {}", path, file.size(), saved.bytes));
  if (saved.header_bytes == 0) return;
  std::string header(static_cast<size_t>(saved.header_bytes), '\0');
  file.read(header.data(), header.size(), 0);
  if (crc32c(header.data(), header.size()) != saved.header_sum)
    throw std::runtime_error(fmt::format("the header of '{}' is damaged", path));
}

}  // namespace

at::Tensor read_tensor(const Index& index, const std::string& name) {
  const auto* saved = index.find(name);
  if (!saved) {
    std::vector<std::string> names;
    for (const auto& [known, tensor] : index.tensors) names.push_back(known);
    fail("read_tensor", "'{}' has no tensor '{}'; closest: {}", index.folder, name,
         names.empty() ? "it has none" : detail::closest(name, names));
  }
  auto result = at::empty(saved->sizes, saved->dtype);
  try {
    for (const auto& piece : saved->pieces) {
      auto bytes = read_piece(index, *saved, piece, disk::File(index.path_of(piece)));
      auto view = result;
      std::vector<int64_t> sizes;
      for (size_t d = 0; d < piece.box.size(); ++d) {
        view = view.narrow(static_cast<int64_t>(d), piece.box[d].begin, piece.box[d].length());
        sizes.push_back(piece.box[d].length());
      }
      if (!bytes.empty()) view.copy_(at::from_blob(bytes.data(), sizes, at::TensorOptions(saved->dtype)));
    }
  } catch (const std::runtime_error& problem) {
    fail("read_tensor", "'{}' cannot be read: {}", name, problem.what());
  }
  return result;
}

std::vector<std::string> faults_of(const Index& index, const std::function<void(int64_t)>& progress) {
  std::vector<std::string> faults;
  const auto attempt = [&](const std::string& what, const auto& work) {
    try {
      work();
      return true;
    } catch (const std::exception& problem) {
      faults.push_back(what + problem.what());
      return false;
    }
  };
  std::map<int32_t, std::vector<std::pair<const std::string*, const Piece*>>> by_file;
  for (const auto& [name, tensor] : index.tensors) {
    for (const auto& piece : tensor.pieces) by_file[piece.file].emplace_back(&name, &piece);
  }
  int64_t done = 0;
  for (auto& [number, pieces] : by_file) {
    const auto& saved = index.files[static_cast<size_t>(number)];
    std::optional<disk::File> file;
    if (!attempt("", [&] { file.emplace(index.folder + "/" + saved.name); })) continue;
    attempt("", [&] { check_file(index, saved, *file); });
    std::ranges::sort(pieces, {}, [](const auto& entry) { return entry.second->offset; });
    for (const auto& [name, piece] : pieces) {
      const auto& tensor = index.tensors.at(*name);
      attempt(fmt::format("tensor '{}': ", *name), [&] { read_piece(index, tensor, *piece, *file); });
      done += numel_of(piece->box) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
      if (progress) progress(done);
    }
  }
  return faults;
}

}  // namespace dtensor::checkpoints
