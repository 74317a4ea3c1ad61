// Attention: the fused operator where libtorch has one, torch::nn::MultiheadAttention, and attention written out.
#include "tests/support/op_check.hpp"

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

namespace {

at::Tensor attend(const Tensors& in, bool causal = false) {
  const auto mask = in.size() > 3 ? c10::make_optional(in[3].detach()) : c10::nullopt;
#if TORCH_VERSION_MAJOR >= 2
  return at::scaled_dot_product_attention(in[0], in[1], in[2], mask, 0, causal);
#else
  return std::get<0>(at::_scaled_dot_product_attention(in[0], in[1], in[2], mask, 0, false, causal));
#endif
}

}  // namespace

TEST_CASE("ops: scaled_dot_product_attention", "[ops][attention]") {
  const auto q = fractions({3, 2, 5, 4}), k = fractions({3, 2, 6, 4}, 1), v = fractions({3, 2, 6, 4}, 2);
  check({"attention", {q, k, v}, [](const Tensors& in) { return Tensors{attend(in)}; }, 1e-5});
  check({"causal",
         {q, fractions({3, 2, 5, 4}, 1), fractions({3, 2, 5, 4}, 2)},
         [](const Tensors& in) { return Tensors{attend(in, true)}; },
         1e-5});
  check({"masked", {q, k, v, fractions({5, 6}, 3)}, [](const Tensors& in) { return Tensors{attend(in)}; }, 1e-5});
  check({"heads back inside", {q, k, v}, [](const Tensors& in) { return Tensors{attend(in).transpose(1, 2).reshape({3, 5, 8})}; }, 1e-5});
  check_free({"batch and heads",
              {fractions({4, 2, 5, 4}), fractions({4, 2, 6, 4}, 1), fractions({4, 2, 6, 4}, 2)},
              [](const Tensors& in) { return Tensors{attend(in)}; },
              1e-5},
             {2, 2}, {{shard(0), shard(1)}, {shard(0), shard(1)}, {shard(0), shard(1)}}, {"(S(0), S(1))"});
  check_free({"queries", {q, k, v}, [](const Tensors& in) { return Tensors{attend(in)}; }, 1e-5}, {3},
             {{shard(2)}, {replicate()}, {replicate()}}, {"(S(2))"});
}

#if TORCH_VERSION_MAJOR >= 2
// The fused kernels of accelerators, as ones of this machine: so their rules run. They pad what they keep of each query, and return
// seeds and other things besides.
namespace {

at::Tensor named(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::string_view name) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = stack[stack.size() - arguments.size() + i];
    if (arguments[i].name() == name && value.isTensor()) return value.toTensor();
  }
  return {};
}

bool flagged(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::string_view name) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return stack[stack.size() - arguments.size() + i].toBool();
  }
  return false;
}

at::Tensor scores(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto q = named(op, stack, "query"), k = named(op, stack, "key"), bias = named(op, stack, "attn_bias");
  auto result = q.matmul(k.transpose(-2, -1)).div(std::sqrt(static_cast<double>(q.size(3))));
  if (bias.defined()) result = result + bias;
  if (flagged(op, stack, "is_causal")) {
    result = result.masked_fill(at::ones({q.size(2), k.size(2)}, at::kBool).tril().logical_not(), -INFINITY);
  }
  return result;
}

void finish(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Tensors& tensors) {
  stack->resize(stack->size() - op.schema().arguments().size());
  size_t next = 0;
  for (const auto& result : op.schema().returns()) {
    const bool tensor = result.type()->kind() == c10::TypeKind::TensorType;
    if (tensor) stack->emplace_back(next < tensors.size() ? tensors[next] : at::zeros({2}, at::kLong)), ++next;
    if (!tensor) stack->emplace_back(int64_t(0));
  }
}

void attend(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto s = scores(op, *stack);
  const auto statistics = at::constant_pad_nd(s.logsumexp(-1), {0, (32 - s.size(2) % 32) % 32});
  finish(op, stack, {s.softmax(-1).matmul(named(op, *stack, "value")), statistics});
}

void attend_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto gradient = named(op, *stack, "grad_out");
  if (!gradient.defined()) gradient = named(op, *stack, "grad_out_");
  const auto q = named(op, *stack, "query"), k = named(op, *stack, "key"), v = named(op, *stack, "value");
  const auto statistics = named(op, *stack, "logsumexp");
  // Where some rank has an empty shard the call is rehearsed first, on constants, which are not padded.
  const bool rehearsed = statistics.numel() > 0 && statistics.min().equal(statistics.max());
  require(statistics.size(0) == q.size(0) && statistics.size(1) == q.size(1) && (statistics.size(2) % 32 == 0 || rehearsed), "test",
          "the statistics do not fit the queries");
  const auto weights = scores(op, *stack).sub(statistics.narrow(2, 0, q.size(2)).unsqueeze(-1)).exp();
  const auto to_out = gradient.mul(named(op, *stack, "out")).sum(-1, true);
  const auto to_scores = weights.mul(gradient.matmul(v.transpose(-2, -1)).sub(to_out));
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  Tensors gradients{to_scores.matmul(k).mul(scale), to_scores.transpose(-2, -1).matmul(q).mul(scale),
                    weights.transpose(-2, -1).matmul(gradient)};
  const auto bias = named(op, *stack, "attn_bias");
  if (op.schema().returns().size() > 3) gradients.push_back(bias.defined() ? to_scores.sum_to_size(bias.sizes()) : at::Tensor());
  finish(op, stack, gradients);
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  for (const std::string kind : {"flash", "efficient"}) {
    const auto name = "_scaled_dot_product_" + kind + "_attention";
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&attend>());
    library.impl((name + "_backward").c_str(), torch::CppFunction::makeFromBoxedFunction<&attend_backward>());
  }
}

}  // namespace

// A rank without queries agrees with the others on how results and gradients lie in memory.
TEST_CASE("ops: attention of more ranks than queries", "[ops][attention]") {
  const auto options = at::TensorOptions(at::kDouble);
  const auto q = torch::randn({4, 6, 5, 8}, options), k = torch::randn({4, 6, 7, 8}, options), v = torch::randn({4, 6, 7, 8}, options);
  const auto seed = torch::randn({4, 6, 5, 8}, options);
  const auto gradients = [&](Tensors in) {
    for (auto& input : in) input.requires_grad_();
    const auto out = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(in[0], in[1], in[2]));
    return torch::autograd::grad({out}, in, {seed});
  };
  const auto expected = gradients({q.clone(), k.clone(), v.clone()});
  CHECK_NOTHROW(on_mesh({4}, [&](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    const auto got = gradients({placed(q, mesh, {shard(2)}), placed(k, mesh, {replicate()}), placed(v, mesh, {replicate()})});
    for (size_t i = 0; i < got.size(); ++i) {
      require(at::allclose(full_tensor(got[i]), expected[i], 1e-9, 1e-9), "test", "gradient {} differs", i);
    }
  }));
}

TEST_CASE("ops: fused attention of accelerators", "[ops][attention]") {
  const auto q = fractions({4, 8, 5, 4}), k = fractions({4, 8, 5, 4}, 1), v = fractions({4, 8, 5, 4}, 2);
  const auto flash = [](const Tensors& in) { return Tensors{std::get<0>(at::_scaled_dot_product_flash_attention(in[0], in[1], in[2]))}; };
  const auto efficient = [](const Tensors& in) {
    const auto bias = in.size() > 3 ? c10::optional<at::Tensor>(in[3]) : c10::nullopt;
    return Tensors{std::get<0>(at::_scaled_dot_product_efficient_attention(in[0], in[1], in[2], bias, true, 0, !bias))};
  };
  check({"flash", {q, k, v}, flash, 1e-5});
  check({"efficient and causal", {q, k, v}, efficient, 1e-5});
  check({"efficient with a bias", {q, k, v, fractions({4, 8, 5, 5}, 3)}, efficient, 1e-5});
  check_over("gloo", {"efficient with a bias", {q, k, v, fractions({4, 8, 5, 5}, 3)}, efficient, 1e-5});
  for (const auto& run : {Function(flash), Function(efficient)}) {
    check_free({"batch and heads", {q, k, v}, run, 1e-5}, {2, 2}, {{shard(0), shard(1)}, {shard(0), shard(1)}, {shard(0), shard(1)}},
               {"(S(0), S(1))"});
  }
}
#endif
