// What the files of torch::save are made of: archives, and whole tensors in them.
#pragma once

#include "src/checkpoint/ranks.hpp"

#include <torch/serialize/archive.h>

#include <string>
#include <unordered_map>

namespace dtensor::files {

// Whole tensors as the first rank writes them, in host memory; the other ranks help to gather and get undefined ones. Names of one tensor
// share memory in the file too.
class Wholes {
 public:
  explicit Wholes(const Ranks& ranks) : ranks_(ranks) {}
  // Throws for a deferred tensor.
  at::Tensor of(const at::Tensor& tensor);

 private:
  const Ranks& ranks_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> known_;
};

// A whole, plain tensor of this rank, as `like` lies.
at::Tensor laid_out_like(const at::Tensor& like, const at::Tensor& whole);

// The file appears under its name when it is complete. Throws std::runtime_error, and leaves nothing behind.
void write_file(torch::serialize::OutputArchive& archive, const std::string& path);

// Tensors are read to the CPU. Throws std::runtime_error.
torch::serialize::InputArchive read_file(const std::string& path);

// The first rank's file, for each of them to read: what reads it may communicate.
torch::serialize::InputArchive read_file_on_all(const Ranks& ranks, const std::string& path);

}  // namespace dtensor::files
