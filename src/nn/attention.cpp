#include <dtensor/nn/attention.hpp>

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace dtensor::nn {

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options) {
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
  return at::scaled_dot_product_attention(q, k, v, {}, options.dropout, options.causal);
#else
  auto scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
  if (options.causal) {
    const auto future = at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  }
  return at::matmul(at::dropout(scores.softmax(-1), options.dropout, options.dropout > 0), v);
#endif
}

at::Tensor repeat_heads(const at::Tensor& x, int64_t times) {
  if (times == 1) return x;
  const auto batch = x.size(0), length = x.size(1), heads = x.size(2), dim = x.size(3);
  return x.unsqueeze(3).expand({batch, length, heads, times, dim}).reshape({batch, length, heads * times, dim});
}

}  // namespace dtensor::nn
