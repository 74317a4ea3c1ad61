#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/index_text.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/checkpoint/read.hpp>
#include <dtensor/parallel/patterns.hpp>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>

namespace dtensor::checkpoints {

namespace {

constexpr size_t kMostFiles = 64;  // that are open

// The files of an index, opened when they are asked for.
class Files {
 public:
  explicit Files(const Index& index) : index_(index) {}
  const disk::File& operator[](int32_t number) {
    const auto known = files_.find(number);
    if (known != files_.end()) return known->second;
    if (files_.size() >= kMostFiles) files_.clear();
    return files_.emplace(number, open_file(index_, number)).first->second;
  }

 private:
  const Index& index_;
  std::map<int32_t, disk::File> files_;
};

int64_t bytes_of(const SavedTensor& tensor, const Piece& piece) {
  return numel_of(piece.box) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

// Reads a piece chunk by chunk, each to `place` of the first of its bytes, and compares its checksums. Throws std::runtime_error.
template <class Place>
void read_piece(const Index& index, const SavedTensor& tensor, const Piece& piece, const disk::File& file, const Place& place) {
  const auto bytes = bytes_of(tensor, piece);
  size_t number = 0;
  for (int64_t begin = 0, size; begin < bytes; begin += size, ++number) {
    size = std::min(index.chunk_bytes, bytes - begin);
    auto* data = place(begin);
    file.read(data, static_cast<size_t>(size), piece.offset + begin);
    if (!piece.sums.empty() && crc32c(data, static_cast<size_t>(size)) != piece.sums[number])
      throw std::runtime_error(fmt::format("bytes {} to {} of '{}' are damaged: their checksum is another", piece.offset + begin,
                                           piece.offset + begin + size, index.path_of(piece)));
  }
}

// Throws unless a file has the bytes of a piece: no memory is taken for what is not there.
void check_place(const SavedTensor& tensor, const Piece& piece, const disk::File& file) {
  const auto size = file.size(), bytes = bytes_of(tensor, piece);
  if (piece.offset < 0 || piece.offset > size || bytes > size - piece.offset)
    throw std::runtime_error(fmt::format("its file has {} bytes; expected {} from byte {} on", size, bytes, piece.offset));
}

at::Tensor read(const Index& index, const SavedTensor& saved) {
  Files files(index);
  for (const auto& piece : saved.pieces) check_place(saved, piece, files[piece.file]);
  auto result = at::empty(saved.sizes, saved.dtype);
  for (const auto& piece : saved.pieces) {
    auto view = result;
    for (size_t d = 0; d < piece.box.size(); ++d)
      view = view.narrow(static_cast<int64_t>(d), piece.box[d].begin, piece.box[d].length());
    const auto memory = view.is_contiguous() ? view : at::empty(view.sizes(), view.options());
    auto* data = static_cast<char*>(memory.data_ptr());
    read_piece(index, saved, piece, files[piece.file], [&](int64_t begin) { return data + begin; });
    if (!memory.is_same(view)) view.copy_(memory);
  }
  return result;
}

}  // namespace

disk::File open_file(const Index& index, int32_t number) {
  const auto& saved = index.files[static_cast<size_t>(number)];
  const auto path = index.folder + "/" + saved.name;
  if (!disk::exists(path))
    throw std::runtime_error(fmt::format("'{}{}: there is no such file; hint: copy it again, or load an earlier step", path, kIsDamaged));
  disk::File file(path);
  if (saved.bytes >= 0 && file.size() != saved.bytes)
    throw std::runtime_error(fmt::format("'{}{}: it has {} bytes; expected {}; hint: it was cut; copy it again, or load an earlier step",
                                         path, kIsDamaged, file.size(), saved.bytes));
  return file;
}

void check_header(const Index& index, int32_t number, const disk::File& file) {
  const auto& saved = index.files[static_cast<size_t>(number)];
  if (saved.header_bytes == 0) return;
  std::string header(static_cast<size_t>(saved.header_bytes), '\0');
  file.read(header.data(), header.size(), 0);
  if (crc32c(header.data(), header.size()) == saved.header_sum) return;
  throw std::runtime_error(fmt::format("'{}/{}{}: the checksum of its header is another; hint: copy it again, or load an earlier step",
                                       index.folder, saved.name, kIsDamaged));
}

at::Tensor read_tensor(const Index& index, const std::string& name) {
  const auto* saved = index.find(name);
  if (!saved) {
    std::vector<std::string> names;
    for (const auto& [known, tensor] : index.tensors) names.push_back(known);
    fail("read_tensor", "'{}' has no tensor '{}'; closest: {}", index.folder, name,
         names.empty() ? "it has none" : detail::closest(name, names));
  }
  try {
    return read(index, *saved);
  } catch (const std::runtime_error& problem) {
    fail("read_tensor", "'{}' cannot be read: {}", name, problem.what());
  }
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
    std::optional<disk::File> file;
    if (!attempt("", [&] { file.emplace(open_file(index, number)); })) continue;
    attempt("", [&] { check_header(index, number, *file); });
    std::ranges::sort(pieces, {}, [](const auto& entry) { return entry.second->offset; });
    for (const auto& [name, piece] : pieces) {
      const auto& tensor = index.tensors.at(*name);
      const auto bytes = bytes_of(tensor, *piece);
      attempt(fmt::format("tensor '{}': ", *name), [&] {
        check_place(tensor, *piece, *file);
        std::string chunk(static_cast<size_t>(std::min(index.chunk_bytes, bytes)), '\0');
        read_piece(index, tensor, *piece, *file, [&](int64_t) { return chunk.data(); });
      });
      done += bytes;
      if (progress) progress(done);
    }
  }
  return faults;
}

}  // namespace dtensor::checkpoints
