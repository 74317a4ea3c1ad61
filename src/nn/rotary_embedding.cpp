#include <dtensor/nn/rotary_embedding.hpp>

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>

namespace dtensor::nn {

at::Tensor rotary_frequencies(int64_t dim, const RotaryOptions& options, const at::TensorOptions& device) {
  TORCH_CHECK(dim > 0 && dim % 2 == 0, "rotary embedding: heads need an even number of elements; got ", dim);
  const auto exponents = at::arange(0, dim, 2, device.dtype(at::kDouble)) * (-std::log(options.theta) / static_cast<double>(dim));
  const auto frequencies = exponents.exp();
  if (!options.scaling) return frequencies;
  const auto& s = *options.scaling;
  const auto waves = frequencies * (static_cast<double>(s.original_length) / (2 * std::numbers::pi));  // in the original length
  const auto kept = ((waves - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)).clamp(0, 1);
  return frequencies * (kept + (1 - kept) / s.factor);
}

RotaryTable rotary_table(int64_t length, int64_t dim, const RotaryOptions& options, const at::Tensor& like) {
  const auto device = at::TensorOptions().device(like.device());
  const auto positions = at::arange(length, device.dtype(at::kDouble));
  const auto angles = positions.unsqueeze(1) * rotary_frequencies(dim, options, device);
  const auto dtype = at::promote_types(like.scalar_type(), at::kFloat);
  return {angles.cos().to(dtype), angles.sin().to(dtype)};
}

at::Tensor apply_rotary(const at::Tensor& x, const RotaryTable& table) {
  const auto length = x.size(1), dim = x.size(3);
  TORCH_CHECK(table.cos.dim() == 2 && table.cos.size(0) == length && table.cos.size(1) * 2 == dim,
              "rotary embedding: a table of ", table.cos.sizes(), " does not fit x ", x.sizes(), "; expected [", length, ", ", dim / 2,
              "]");
  const auto cos = table.cos.unsqueeze(1), sin = table.sin.unsqueeze(1);  // one for all heads
  const auto pairs = x.reshape({x.size(0), length, x.size(2), dim / 2, 2}).unbind(-1);
  const auto turned = at::stack({pairs[0] * cos - pairs[1] * sin, pairs[0] * sin + pairs[1] * cos}, -1);
  return turned.flatten(-2).to(x.scalar_type());
}

}  // namespace dtensor::nn
