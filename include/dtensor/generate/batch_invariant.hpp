// Forward passes whose numbers do not depend, to the bit, on what shares the batch: so that the log-probabilities that an engine returns
// are those that training computes.
//
//   dtensor::generate::Engine engine(*model, {.batch_invariant = true});
//   auto completion = engine.generate({prompt})[0];
//
//   dtensor::generate::BatchInvariant region;
//   auto logprobs = model->forward(ids).log_softmax(-1);        // bit-equal to completion.outputs[0].logprobs, on as many ranks
//
// While a region lives, on this thread: products with a matrix (linear, matmul, mm, addmm) add up in one order, whatever the number of
// rows; attention goes page by page, as the engine's does; silu, gelu, sigmoid, tanh, sine and cosine are computed in whole vectors.
// Gradients flow. What libtorch computes row by row (norms, softmax) stays. On the CPU, of float32, bfloat16 and float64. Linear layers
// that a mesh cuts along their inputs add up ranks' sums, so the bits are those of as many ranks.
#pragma once

#include <dtensor/generate/paged_attention.hpp>
#include <dtensor/generate/step.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/attention_hook.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// The part of it for layers other than attention; with `products_only`, for products alone, which are then fast for few rows.
class InvariantRows {
 public:
  explicit InvariantRows(bool products_only = false);
  ~InvariantRows();
  InvariantRows(const InvariantRows&) = delete;
  InvariantRows& operator=(const InvariantRows&) = delete;

 private:
  const c10::impl::IncludeDispatchKeyGuard include_{c10::DispatchKey::DeferredInit};
  const bool before_;
};

class BatchInvariant {
 public:
  BatchInvariant();
  ~BatchInvariant();
  BatchInvariant(const BatchInvariant&) = delete;
  BatchInvariant& operator=(const BatchInvariant&) = delete;

 private:
  World& world_;
  const World::Use use_{world_};  // outside of a launch, no rank's hook is asked
  AttentionHook hook_;
  const InvariantRows rows_{};
};

// x [rows, k] and w [outputs, k] -> x w^T [rows, outputs]. An element's bits depend on its row of x and its row of w alone. float32,
// bfloat16 (with float32 sums) and float64, on the CPU. Differentiable. As DTensors: cut along rows, outputs or k.
at::Tensor rows_product(const at::Tensor& x, const at::Tensor& w);
// Up to how many rows it is faster than libtorch's product, on this processor.
int64_t few_rows();

// Causal attention of whole sequences, q [batch, heads, length, dim], k and v with key heads, as an engine's pages give it. Differentiable.
at::Tensor attention_by_pages(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Gradients by the formula, from the weights computed anew.
class AttentionByPages : public torch::autograd::Function<AttentionByPages> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
    context->save_for_backward({q, k, v});
    context->saved_data["scale"] = scale;
    return attend_by_pages(q, k, v, scale);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto scale = context->saved_data["scale"].toDouble();
    const auto &q = saved[0], &k = saved[1], &v = saved[2];
    const auto group = q.size(1) / std::max<int64_t>(k.size(1), 1);
    const auto repeated = [group](const at::Tensor& x) { return group == 1 ? x : x.repeat_interleave(group, 1); };
    const auto summed = [group](const at::Tensor& x) { return group == 1 ? x : x.unflatten(1, {-1, group}).sum(2); };
    const auto hidden = at::ones({q.size(2), q.size(2)}, q.options().dtype(at::kBool)).triu(1);
    const auto scores = at::matmul(q, repeated(k).transpose(2, 3)).mul(scale);
    const auto weights = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
    const auto of_weights = at::matmul(gradients[0], repeated(v).transpose(2, 3));
    const auto of_scores = weights.mul(of_weights.sub(of_weights.mul(weights).sum(-1, true))).mul(scale);
    return {at::matmul(of_scores, repeated(k)), summed(at::matmul(of_scores.transpose(2, 3), q)),
            summed(at::matmul(weights.transpose(2, 3), gradients[0])), at::Tensor()};
  }
};

// What libtorch's attention becomes; nothing where the pages cannot compute it.
inline c10::optional<at::Tensor> invariant_attention(const AttentionArguments& a) {
  const bool takes = a.causal && !a.mask.defined() && a.dropout == 0 && !a.asks_for_weights && a.q.dim() == 4 && a.q.size(2) == a.k.size(2);
  if (!takes) return {};
  return attention_by_pages(a.q, a.k, a.v, a.scale > 0 ? a.scale : 1 / std::sqrt(static_cast<double>(a.q.size(3))));
}

}  // namespace detail

inline BatchInvariant::BatchInvariant() : world_(World::current()), hook_(world_.local<AttentionHook>()) {
  world_.local<AttentionHook>().compute = &detail::invariant_attention;
}

inline BatchInvariant::~BatchInvariant() { world_.local<AttentionHook>() = hook_; }

inline at::Tensor attention_by_pages(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  const auto run = [scale](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return at::Tensor(detail::AttentionByPages::apply(a, b, c, scale));
  };
  if (!is_dtensor(q)) return run(q, k, v);
  const auto& layout = *find_layout(q);
  Placements all;
  for (const auto& placement : layout.placements()) {
    all.push_back(placement == shard(0) || placement == shard(1) ? placement : replicate());
  }
  LocalMapOptions options;
  options.out_sizes = {{q.size(0), q.size(1), q.size(2), v.size(3)}};
  return local_map(run, layout.mesh(), {all, all, all}, {all}, options)(q, k, v);
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
