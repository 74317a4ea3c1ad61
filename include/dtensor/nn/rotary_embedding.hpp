// Rotary position embeddings (Su et al., "RoFormer", 2021), with the scaling of frequencies that came with Llama 3.1, and YaRN's.
#pragma once

#include <dtensor/tensor/attention_region.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/promote_types.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/stack.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::nn {

// Stretches long waves, for contexts longer than `original_length`, the length of the first training. Waves shorter than original_length /
// high_frequency_factor stay. Waves longer than original_length / low_frequency_factor become `factor` times as long. Between the two the
// frequency is interpolated.
struct RotaryScaling {
  double factor = 8;
  double low_frequency_factor = 1, high_frequency_factor = 4;
  int64_t original_length = 8192;
  bool operator==(const RotaryScaling&) const = default;
};

// YaRN (Peng et al., 2023), which stretches long waves too. Those that turn `fast` times or more within `original_length` stay, those that
// turn `slow` times or less become `factor` times as long, and between the two, the frequency goes linearly with its number.
struct YarnScaling {
  double factor = 40;
  double fast = 32, slow = 1;
  int64_t original_length = 4096;
  double sharpness = 1;  // DeepSeek's mscale_all_dim: see yarn_attention_scale
  bool operator==(const YarnScaling&) const = default;
};

struct RotaryOptions {
  double theta = 10000;  // the longest wave is nearly 2 pi theta positions
  std::optional<RotaryScaling> scaling = std::nullopt;
  std::optional<YarnScaling> yarn = std::nullopt;  // one of the two at most
  bool operator==(const RotaryOptions&) const = default;
};

// What attention multiplies its scores by where positions are stretched: (0.1 sharpness log(factor) + 1)^2; 1 without YaRN.
double yarn_attention_scale(const RotaryOptions& options);

// Radians a position, float64 [dim / 2]: theta^(-2i / dim), scaled. Throws c10::Error when dim is odd.
at::Tensor rotary_frequencies(int64_t dim, const RotaryOptions& options, const at::TensorOptions& device = {});

struct RotaryTable {
  at::Tensor cos, sin;  // [length, dim / 2]
};

// The table for positions 0 to length - 1, in the order of a dt::ContextParallel if there is one, and heads of `dim` elements, on the
// device of `like`. It is float64 when `like` is, else float32. On the CPU a rank keeps the longest one that it has made of each kind, and
// copies rows of it.
RotaryTable rotary_table(int64_t length, int64_t dim, const RotaryOptions& options, const at::Tensor& like);

// Turns each pair of neighbours (x[2i], x[2i + 1]) at position p by p * frequency[i], as Meta's checkpoints expect: [batch, length, heads,
// dim] -> the same, in the dtype of x. Communicates nothing when batch, length and heads are sharded. Throws c10::Error for other sizes and
// for x of integers.
at::Tensor apply_rotary(const at::Tensor& x, const RotaryTable& table);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// The operator dtensor::rotary (src/nn/rotary.cpp): apply_rotary() on the CPU in one pass over x, with the same bits.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

// table_of() on the CPU, of positions that are plain or replicated.
RotaryTable kept_table(const at::Tensor& positions, int64_t dim, const RotaryOptions& options, c10::ScalarType dtype);

// cos and sin of positions, int64 [length].
inline RotaryTable table_of(const at::Tensor& positions, int64_t dim, const RotaryOptions& options, c10::ScalarType dtype);

inline bool has_kernel(const at::Tensor& x, const RotaryTable& table) {
  const bool takes = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble || x.scalar_type() == at::kBFloat16;
  return takes && (x.is_cpu() || x.is_meta()) && !table.cos.requires_grad() && !table.sin.requires_grad();
}

// Of `frequencies` [dim / 2].
inline at::Tensor stretched_by_yarn(const at::Tensor& frequencies, const RotaryOptions& options) {
  const auto& yarn = *options.yarn;
  const auto dim = 2 * static_cast<double>(frequencies.size(0));
  const auto number_of = [&](double turns) {  // of the frequency that turns so often within the original length
    return dim * std::log(static_cast<double>(yarn.original_length) / (turns * 2 * std::numbers::pi)) / (2 * std::log(options.theta));
  };
  const double first = std::max(std::floor(number_of(yarn.fast)), 0.0), last = std::min(std::ceil(number_of(yarn.slow)), dim - 1);
  const auto numbers = at::arange(frequencies.size(0), frequencies.options());
  const auto stretched = numbers.sub(first).div(first == last ? 0.001 : last - first).clamp(0, 1);
  return frequencies.mul(at::rsub(stretched, 1).add(stretched.div(yarn.factor)));
}

}  // namespace detail

inline double yarn_attention_scale(const RotaryOptions& options) {
  if (!options.yarn || options.yarn->factor <= 1) return 1;
  const double root = 0.1 * options.yarn->sharpness * std::log(options.yarn->factor) + 1;
  return root * root;
}

inline at::Tensor rotary_frequencies(int64_t dim, const RotaryOptions& options, const at::TensorOptions& device) {
  TORCH_CHECK(dim > 0 && dim % 2 == 0, "rotary embedding: heads need an even number of elements; got ", dim);
  const auto exponents = at::arange(0, dim, 2, device.dtype(at::kDouble)).mul(-std::log(options.theta) / static_cast<double>(dim));
  const auto frequencies = exponents.exp();
  if (options.yarn) return detail::stretched_by_yarn(frequencies, options);
  if (!options.scaling) return frequencies;
  const auto& s = *options.scaling;
  const auto waves = frequencies.mul(static_cast<double>(s.original_length) / (2 * std::numbers::pi));  // in the original length
  const auto kept = waves.sub(s.low_frequency_factor).div(s.high_frequency_factor - s.low_frequency_factor).clamp(0, 1);
  return frequencies.mul(kept.add(at::rsub(kept, 1).div(s.factor)));  // kept + (1 - kept) / factor
}

inline RotaryTable rotary_table(int64_t length, int64_t dim, const RotaryOptions& options, const at::Tensor& like) {
  const auto positions = sequence_positions(length, at::TensorOptions().device(like.device()));
  const auto dtype = at::promote_types(like.scalar_type(), at::kFloat);
  return positions.is_cpu() ? detail::kept_table(positions, dim, options, dtype) : detail::table_of(positions, dim, options, dtype);
}

inline RotaryTable detail::table_of(const at::Tensor& positions, int64_t dim, const RotaryOptions& options, c10::ScalarType dtype) {
  const auto angles = positions.to(at::kDouble).unsqueeze(1).mul(rotary_frequencies(dim, options, positions.device()));
  return {angles.cos().to(dtype), angles.sin().to(dtype)};
}

inline at::Tensor apply_rotary(const at::Tensor& x, const RotaryTable& table) {
  TORCH_CHECK(x.dim() == 4 && x.is_floating_point(), "rotary embedding: got x ", x.sizes(), " of ", x.scalar_type(),
              "; expected floating [batch, length, heads, dim]");
  const auto length = x.size(1), dim = x.size(3);
  TORCH_CHECK(table.cos.dim() == 2 && table.cos.size(0) == length && table.cos.size(1) * 2 == dim, "rotary embedding: a table of ",
              table.cos.sizes(), " does not fit x ", x.sizes(), "; expected [", length, ", ", dim / 2, "]");
  if (detail::has_kernel(x, table)) return detail::turned(x, table.cos, table.sin);
  const auto cos = table.cos.unsqueeze(1), sin = table.sin.unsqueeze(1);  // one for all heads
  const auto pairs = x.reshape({x.size(0), length, x.size(2), dim / 2, 2}).unbind(-1);
  const auto turned = at::stack({pairs[0].mul(cos).sub(pairs[1].mul(sin)), pairs[0].mul(sin).add(pairs[1].mul(cos))}, -1);
  return turned.flatten(-2).to(x.scalar_type());
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
