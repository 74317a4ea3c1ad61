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

}  // namespace dtensor::checkpoints

#pragma GCC visibility pop
