// Handwritten digits (data/), cut into training batches. The batch of a step is a function of (seed, step) alone, as in ../text_data.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zoo {

class Digits {
 public:
  static constexpr int64_t kSize = 8;  // height and width

  struct Image {
    std::array<float, kSize * kSize> pixels;  // row by row, from -1 to 1
    int64_t digit;
  };

  // Reads a line an image: 64 numbers from 0 to 16, row by row, and the digit. `path`: the file, or empty for the one in the sources.
  // Throws std::runtime_error when it cannot be read.
  explicit Digits(const std::string& path = "");

  size_t size() const { return images_.size(); }
  const Image& operator[](size_t index) const { return images_[index]; }

  // Images float32 [batch, channels, size, size] from -1 to 1, pixels repeated where the size is above 8 and channels all alike, and their
  // digits int64 [batch]. Plain tensors.
  std::pair<at::Tensor, at::Tensor> batch(uint64_t seed, uint64_t step, int64_t batch, int64_t channels, int64_t size) const;

 private:
  static Image parse(const std::string& line, const std::string& path);

  std::vector<Image> images_;
};

}  // namespace zoo
