// What is where in a checkpoint: the index of a step of dt::save, or what was made of the files of another library. Reading one needs no
// ranks.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::checkpoints {

using Box = std::vector<Interval>;  // global indices, one interval per dim

int64_t numel_of(const Box& box);

// What is saved beside tensors.
using Value = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>>;
std::string text_of(const Value& value);  // for people

// A box of a tensor's elements, row-major and without gaps, in a file.
struct Piece {
  Box box;
  int32_t file = 0;              // in Index::files
  int64_t offset = 0;            // of its first byte
  std::vector<uint32_t> sums{};  // CRC32C of each Index::chunk_bytes of it, the last may be shorter; empty: not known
};

struct SavedTensor {
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> sizes;
  std::vector<Piece> pieces;

  int64_t numel() const;
  int64_t bytes() const;
};

struct SavedFile {
  std::string name;          // within the folder
  int64_t bytes = -1;        // of the whole file; -1: not known
  int64_t header_bytes = 0;  // of its beginning, which `header_sum` is the checksum of
  uint32_t header_sum = 0;
};

struct Index {
  std::string folder;  // where the files are
  int64_t step = 0;
  std::string attempt;                        // what tells two saves of one step apart; part of the files' names
  std::map<std::string, std::string> writer;  // "dtensor", "libtorch", "ranks", "run", "time"
  int64_t chunk_bytes = int64_t{1} << 20;
  std::vector<SavedFile> files;
  std::map<std::string, SavedTensor> tensors;
  std::map<std::string, std::string> same_as;  // further names of tensors: {"lm_head.weight", "embedding.weight"}
  std::map<std::string, Value> values;

  // The tensor of a name, also of a further one; null: there is none.
  const SavedTensor* find(const std::string& name) const;
  std::string path_of(const Piece& piece) const { return folder + "/" + files[static_cast<size_t>(piece.file)].name; }
  int64_t bytes() const;  // of all tensors
};

// The text of an index: JSON, whose first line has the checksum of what follows.
std::string to_text(const Index& index);

// Throws dtensor::Error for a text that is damaged or not consistent in itself: a piece outside its tensor or its file, pieces that overlap
// or leave elements out, names that would leave the folder, another version. `path` is named in the error.
Index index_from(const std::string& text, const std::string& path);

// Reads and checks the index of a step's folder ("run/step-100").
Index read_index(const std::string& step_folder);

}  // namespace dtensor::checkpoints

#pragma GCC visibility pop
