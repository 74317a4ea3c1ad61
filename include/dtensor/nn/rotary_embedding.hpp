// Rotary position embeddings (Su et al., "RoFormer", 2021), with the scaling of frequencies that came with Llama 3.1.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <optional>

namespace dtensor::nn {

// Stretches long waves, for contexts longer than `original_length`, the length of the first training. Waves shorter than original_length /
// high_frequency_factor stay. Waves longer than original_length / low_frequency_factor become `factor` times as long. Between the two the
// frequency is interpolated.
struct RotaryScaling {
  double factor = 8;
  double low_frequency_factor = 1, high_frequency_factor = 4;
  int64_t original_length = 8192;
};

struct RotaryOptions {
  double theta = 10000;  // the longest wave is nearly 2 pi theta positions
  std::optional<RotaryScaling> scaling = std::nullopt;
};

// Radians a position, float64 [dim / 2]: theta^(-2i / dim), scaled. Throws c10::Error when dim is odd.
at::Tensor rotary_frequencies(int64_t dim, const RotaryOptions& options, const at::TensorOptions& device = {});

struct RotaryTable {
  at::Tensor cos, sin;  // [length, dim / 2]
};

// The table for positions 0 to length - 1 and heads of `dim` elements, on the device of `like`. It is float64 when `like` is, else float32.
RotaryTable rotary_table(int64_t length, int64_t dim, const RotaryOptions& options, const at::Tensor& like);

// Turns each pair of neighbours (x[2i], x[2i + 1]) at position p by p * frequency[i], as Meta's checkpoints expect: [batch, length, heads,
// dim] -> the same, in the dtype of x. Communicates nothing when batch, length and heads are sharded.
at::Tensor apply_rotary(const at::Tensor& x, const RotaryTable& table);

}  // namespace dtensor::nn
