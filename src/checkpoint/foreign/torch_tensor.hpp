// Tensors in the archives of torch.save: what their pickles say of them, and where their elements are.
#pragma once

#include "src/checkpoint/foreign/pickle.hpp"
#include "src/checkpoint/foreign/zip.hpp"

#include <dtensor/checkpoint/index.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::checkpoints::foreign {

// Bounds the memory that a file can make its reader take, by its size: a short pickle can say the same thing very often.
class Budget {
 public:
  explicit Budget(int64_t file_bytes) : left_((size_t{64} << 20) + 16 * static_cast<size_t>(std::min(file_bytes, int64_t{1} << 28))) {}
  // Throws std::runtime_error, which says why, when it is used up.
  void spend(size_t bytes, const std::string& why = "what it describes takes far more memory than it has bytes");

 private:
  size_t left_;
};

// The dtype that PyTorch calls "float32"; nothing where this libtorch has none such.
std::optional<c10::ScalarType> dtype_called(std::string_view name);
std::string_view name_of_dtype(c10::ScalarType dtype);
// The dtype of the class of storages "FloatStorage"; nothing for UntypedStorage.
std::optional<c10::ScalarType> dtype_of_storage(std::string_view name);
// Empty for dtypes that have no such class.
std::string_view name_of_storage(c10::ScalarType dtype);

// A tensor as a pickle describes it, which lives on; its numbers are checked to be sensible, not to lie in the storage.
struct TorchTensor {
  c10::ScalarType dtype = c10::kFloat;
  std::string_view storage;  // the name of its record, "0"
  int64_t offset = 0;        // in elements
  std::vector<int64_t> sizes, strides;

  bool operator==(const TorchTensor&) const = default;
};

// Throws std::runtime_error for what is no dense tensor, or of an unknown dtype.
TorchTensor tensor_from(const pickle::Value& value);

// The non-negative numbers of a torch.Size or another list.
std::vector<int64_t> sizes_from(const pickle::Value& value);

// The tensor in a storage of `bytes` bytes that begins at `begin` of a file: one piece where it is row-major there, else one of each run of
// elements that is. What it takes is spent: memory for the pieces, and what a tensor has beyond its storage, elements of which it repeats.
std::vector<Piece> pieces_of(const TorchTensor& tensor, int32_t file, int64_t begin, int64_t bytes, Budget& budget);

// An archive of torch.save within a file: its pickle and its storages.
class TorchArchive {
 public:
  TorchArchive(const disk::File& file, int64_t begin, int64_t bytes);

  const pickle::Value& root() const { return pickle_->root(); }
  SavedTensor saved(const TorchTensor& tensor, int32_t file, Budget& budget) const;

 private:
  ZipReader zip_;
  std::string prefix_;
  std::unique_ptr<pickle::Document> pickle_;
};

}  // namespace dtensor::checkpoints::foreign
