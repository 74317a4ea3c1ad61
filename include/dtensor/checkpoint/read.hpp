// Reading checkpoints without ranks: one process, whole tensors on the CPU. For tools and for a look.
#pragma once

#include <dtensor/checkpoint/index.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::checkpoints {

// A whole tensor, its checksums compared. Throws dtensor::Error for a name that the index has not (naming the closest), and for data that
// are damaged or cannot be read, naming the file.
at::Tensor read_tensor(const Index& index, const std::string& name);

// Everything that is wrong with the files of an index: each is read once, headers and data. Empty: every checksum is right. `progress` is
// told how many bytes have been read.
std::vector<std::string> faults_of(const Index& index, const std::function<void(int64_t bytes)>& progress = {});

// A folder of Hugging Face, with model.safetensors or model.safetensors.index.json, or one safetensors file: its tensors by their names
// there, without checksums, for read_tensor and dt::load. Throws dtensor::Error for files that are missing or no safetensors files, and for
// dtypes that libtorch has not.
Index read_huggingface(const std::string& path);

// Writes tensors to a folder that is new or empty, as Hugging Face's from_pretrained and safetensors read it: model.safetensors, or where
// they are more than `file_bytes`, model-00001-of-0000N.safetensors and model.safetensors.index.json. `tensor` gives a whole tensor for a
// name, and is called once for each, in order. Throws dtensor::Error where the folder has files, or cannot be written.
void write_huggingface(const std::string& folder, const std::vector<std::pair<std::string, SavedTensor>>& tensors,
                       const std::function<at::Tensor(const std::string& name)>& tensor, int64_t file_bytes = int64_t{5} << 30);

}  // namespace dtensor::checkpoints

#pragma GCC visibility pop
