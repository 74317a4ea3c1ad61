// The ranks that save or load something together. The first of them reads and writes the file.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::files {

class Ranks {
 public:
  // The ranks of the meshes that `tensors` lie on, or of the world when all tensors are plain. Throws when no mesh holds the others.
  Ranks(std::string_view tag, c10::ArrayRef<at::Tensor> tensors);

  bool is_first() const { return !group_ || group_->rank() == 0; }

  // Runs `work` on the first rank. What it throws is thrown on every rank. Every rank returns after it.
  void first_does(const std::function<void()>& work) const;

  // Send the first rank's text, or its tensor, to all ranks. The tensor is contiguous and on the CPU; the other ranks give one like it.
  std::string from_first(const std::string& text) const;
  at::Tensor from_first(const at::Tensor& tensor) const;

 private:
  std::string_view tag_;
  std::optional<DeviceMesh> line_;
  comm::Communicator* group_ = nullptr;
};

}  // namespace dtensor::files
