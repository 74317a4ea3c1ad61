// Attention: the fused operator where libtorch has one, torch::nn::MultiheadAttention, and attention written out.
#include "op_check.hpp"

#include <torch/version.h>

using namespace dtensor;
using namespace dtensor::test;

TEST_CASE("ops: attention written out", "[ops][attention]") {
  const auto q = fractions({3, 2, 5, 4}), k = fractions({3, 2, 6, 4}, 1), v = fractions({3, 2, 6, 4}, 2);
  check({"attention",
         {q, k, v},
         [](const Tensors& in) {
           const auto weights = (torch::matmul(in[0], in[1].transpose(-2, -1)) / 2).softmax(-1);
           return Tensors{torch::matmul(weights, in[2])};
         },
         1e-5});
}

TEST_CASE("ops: MultiheadAttention", "[ops][attention]") {
  const auto x = fractions({5, 3, 8});
  torch::nn::MultiheadAttention plain(torch::nn::MultiheadAttentionOptions(8, 2));
  torch::NoGradGuard no_grad;
  for (auto& parameter : plain->parameters()) parameter.copy_(fractions(parameter.sizes(), parameter.dim()) / 2);
  const auto [expected, weights] = plain->forward(x, x, x);
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}}) {
    CHECK_NOTHROW(on_mesh(sizes, [&, expected = expected](const DeviceMesh& mesh) {
      torch::NoGradGuard no_grad_here;
      Spmd spmd(mesh);
      torch::nn::MultiheadAttention module(torch::nn::MultiheadAttentionOptions(8, 2));
      for (auto& parameter : module->parameters()) parameter.copy_(fractions(parameter.sizes(), parameter.dim()) / 2);
      for (const auto& placement : {replicate(), shard(0), shard(1), shard(2), partial()}) {
        const auto input = placed(x, mesh, Placements(mesh.ndim(), placement));
        const auto [got, got_weights] = module->forward(input, input, input);
        require(at::allclose(full_tensor(got), expected, 1e-5, 1e-5), "test", "{} differs", placement.str());
      }
    }));
  }
}

#if TORCH_VERSION_MAJOR >= 2
TEST_CASE("ops: scaled_dot_product_attention", "[ops][attention]") {
  const auto q = fractions({3, 2, 5, 4}), k = fractions({3, 2, 6, 4}, 1), v = fractions({3, 2, 6, 4}, 2);
  check({"attention",
         {q, k, v},
         [](const Tensors& in) { return Tensors{at::scaled_dot_product_attention(in[0], in[1], in[2])}; },
         1e-5});
  check({"causal",
         {q, fractions({3, 2, 5, 4}, 1), fractions({3, 2, 5, 4}, 2)},
         [](const Tensors& in) { return Tensors{at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0, true)}; },
         1e-5});
  check(
      {"masked",
       {q, k, v, fractions({5, 6}, 3)},
       [](const Tensors& in) { return Tensors{at::scaled_dot_product_attention(in[0], in[1], in[2], in[3].detach())}; },
       1e-5});
  check({"heads back inside",
         {q, k, v},
         [](const Tensors& in) {
           return Tensors{at::scaled_dot_product_attention(in[0], in[1], in[2]).transpose(1, 2).reshape({3, 5, 8})};
         },
         1e-5});
  check_free({"batch and heads",
              {q, k, v},
              [](const Tensors& in) { return Tensors{at::scaled_dot_product_attention(in[0], in[1], in[2])}; },
              1e-5},
             {2, 2}, {{shard(0), shard(1)}, {shard(0), shard(1)}, {shard(0), shard(1)}}, {"(S(0), S(1))"});
  check_free({"queries",
              {q, k, v},
              [](const Tensors& in) { return Tensors{at::scaled_dot_product_attention(in[0], in[1], in[2])}; },
              1e-5},
             {3}, {{shard(2)}, {replicate()}, {replicate()}}, {"(S(2))"});
}
#endif
