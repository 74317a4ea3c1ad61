// What an object writes to an archive of libtorch, as named leaves, and back. Nothing of a file is run: the archives that are read here are
// made here.
#pragma once

#include <dtensor/checkpoint/index.hpp>
#include <dtensor/checkpoint/state.hpp>

#include <torch/serialize/archive.h>

#include <functional>
#include <map>
#include <string>

namespace dtensor::checkpoints {

// The leaves: numbers, texts, lists of them, tensors. A nested archive's name and a dot stand before its leaves' names. What is None is
// left out. Throws std::runtime_error for a leaf of another kind.
Contents contents_of(const std::function<void(torch::serialize::OutputArchive&)>& save);

// Gives `load` an archive like the one that `save` writes now, in which leaves have the values and tensors that `value` and `tensor` return
// for their names. Where these return nothing a leaf stays as it is.
struct Leaves {
  std::function<const Value*(const std::string& name)> value;
  std::function<const at::Tensor*(const std::string& name)> tensor;
};
void load_from(const Leaves& leaves, const std::function<void(torch::serialize::OutputArchive&)>& save,
               const std::function<void(torch::serialize::InputArchive&)>& load);

}  // namespace dtensor::checkpoints
