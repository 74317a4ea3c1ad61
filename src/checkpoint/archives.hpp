// Reading and writing the files of torch::save: archives with whole tensors.
#pragma once

#include "src/checkpoint/ranks.hpp"

#include <torch/serialize/archive.h>

#include <string>
#include <unordered_map>

namespace dtensor::files {

// Makes the whole tensors that the first rank writes, in host memory. The other ranks take part in the gather and get undefined tensors.
// Two names of one tensor share memory in the file too.
class Wholes {
 public:
  explicit Wholes(const Ranks& ranks) : ranks_(ranks) {}
  // Throws for a deferred tensor.
  at::Tensor of(const at::Tensor& tensor);

 private:
  const Ranks& ranks_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> known_;
};

// Distributes a whole, plain tensor of this rank in the layout of `like`.
at::Tensor laid_out_like(const at::Tensor& like, const at::Tensor& whole);

// Writes a file, which appears under its name when it is complete. When it throws (std::runtime_error), it leaves nothing behind.
void write_file(torch::serialize::OutputArchive& archive, const std::string& path);

// Reads a file, its tensors to the CPU. Throws std::runtime_error.
torch::serialize::InputArchive read_file(const std::string& path);

// Lets every rank read the first rank's file; the function that reads it may communicate.
torch::serialize::InputArchive read_file_on_all(const Ranks& ranks, const std::string& path);

}  // namespace dtensor::files
