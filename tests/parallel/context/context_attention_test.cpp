// Attention over cut sequences, by every method under every mask, against one device.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/parallel/context/attention.hpp>

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;
using context::Positions;

namespace {

// What one device computes, with a whole mask.
struct Expected {
  at::Tensor out, dq, dk, dv;
};

at::Tensor hidden_pairs(const AttentionMask& mask, const PackedSequence& sequence) {
  auto hidden = at::empty({sequence.length(), sequence.length()}, at::kBool);
  for (int64_t q = 0; q < sequence.length(); ++q) {
    for (int64_t k = 0; k < sequence.length(); ++k) hidden[q][k] = !mask.allows(q, k, sequence);
  }
  return hidden;
}

Expected on_one_device(const std::vector<at::Tensor>& qkv, const at::Tensor& grad, const AttentionMask& mask,
                       const std::vector<PackedSequence>& sequences) {
  std::vector<at::Tensor> leaves, hidden;
  for (const auto& x : qkv) leaves.push_back(x.to(at::kDouble).detach().requires_grad_());
  for (const auto& sequence : sequences) hidden.push_back(hidden_pairs(mask, sequence));
  const auto group = leaves[0].size(1) / leaves[1].size(1);
  const auto repeated = [&](const at::Tensor& x) { return x.repeat_interleave(group, 1); };
  const auto unseen = at::stack(hidden).unsqueeze(1);
  const auto scores = at::matmul(leaves[0], repeated(leaves[1]).transpose(2, 3)) / std::sqrt(static_cast<double>(leaves[0].size(3)));
  const auto weights = at::softmax(scores.masked_fill(unseen, -1e300), -1).masked_fill(unseen, 0);
  const auto out = at::matmul(weights, repeated(leaves[2]));
  const auto gradients = torch::autograd::grad({out}, leaves, {grad.to(at::kDouble)});
  return {out.detach(), gradients[0], gradients[1], gradients[2]};
}

struct Case {
  std::string method, order;
  AttentionMask mask;
  std::vector<PackedSequence> sequences;
  int64_t batch, heads, key_heads;
  int neighbours = 2;  // of usp
};

std::vector<Positions> rows_of(const Case& c, int ranks) {
  const auto length = c.sequences[0].length();
  if (c.order == "zigzag") return context::zigzag_order(length, ranks);
  if (c.order == "stripes") return context::striped_order(length, ranks);
  if (c.order == "balanced") return context::balanced_order(c.mask, c.sequences[0], ranks, 3);
  return context::contiguous_order(length, ranks);
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (b.numel() == 0) return 0;
  return (a.to(at::kDouble) - b).abs().max().item<double>();
}

// Of each result, relative to the largest element of the whole.
void check_rank(const Case& c, int ranks, at::ScalarType dtype, double most) {
  const NoSpmd plain;
  const auto flat = init_device_mesh(c10::kCPU, {ranks}, {"cp"});
  const auto mesh = c.method == "usp" ? init_device_mesh(c10::kCPU, {ranks / c.neighbours, c.neighbours}, {"ring", "heads"}) : flat;
  const auto length = c.sequences[0].length();
  const ContextPlan plan(c.mask, c.sequences, rows_of(c, ranks));
  const auto random = [&](int64_t heads, int seed) {
    torch::manual_seed(seed);
    return torch::randn({c.batch, heads, length, 5}, at::kDouble).to(dtype);
  };
  const std::vector<at::Tensor> qkv{random(c.heads, 1), random(c.key_heads, 2), random(c.key_heads, 3)};
  const auto grad = random(c.heads, 4);
  const auto expected = on_one_device(qkv, grad, c.mask, c.sequences);
  const auto rows = at::tensor(plan.rows(flat.coordinate(0)), at::kLong);
  std::vector<at::Tensor> own;
  for (const auto& x : qkv) own.push_back(x.index_select(2, rows).requires_grad_());
  const auto out = context_attention(own[0], own[1], own[2], plan, mesh, {.method = c.method});
  out.backward(grad.index_select(2, rows));
  const auto check = [&](const char* what, const at::Tensor& got, const at::Tensor& whole) {
    require(got.scalar_type() == dtype, "test", "{} is {}", what, c10::toString(got.scalar_type()));
    const auto difference = largest_difference(got, whole.index_select(2, rows)) / std::max(1e-300, whole.abs().max().item<double>());
    require(difference <= most, "test", "{} differs by {}", what, difference);
  };
  check("the output", out, expected.out);
  check("dq", own[0].grad(), expected.dq);
  check("dk", own[1].grad(), expected.dk);
  check("dv", own[2].grad(), expected.dv);
}

std::vector<AttentionMask> all_masks(int64_t documents) {
  std::vector<int64_t> prefixes;
  for (int64_t d = 0; d < documents; ++d) prefixes.push_back(d * 2);
  return {AttentionMask::full(),
          AttentionMask::causal(),
          AttentionMask::sliding_window(3, 2),
          AttentionMask::causal_sliding_window(4),
          AttentionMask::global_sliding_window(2, 3, 1),
          AttentionMask::documents(),
          AttentionMask::causal_documents(),
          AttentionMask::prefix_lm(7),
          AttentionMask::prefix_lm_documents(prefixes),
          AttentionMask::shared_question(),
          AttentionMask::causal_blocks(),
          AttentionMask::block_causal_documents(3),
          AttentionMask::from([](int64_t q, int64_t k, int64_t, int64_t) { return (q * 7 + k * 13) % 5 < 2 && q % 6 != 1; })};
}

}  // namespace

TEST_CASE("context attention: every method under every mask gives one device's numbers", "[context]") {
  const std::vector<PackedSequence> sequences[] = {{PackedSequence({5, 9, 1, 8, 1})},
                                                   {PackedSequence({4, 9, 11}), PackedSequence({12, 7, 5})}};
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const auto& packed : sequences) {
      for (const auto& mask : all_masks(packed[0].documents())) {
        for (const std::string method : {"ring", "allgather", "ulysses", "usp", "tokenring"}) {
          if (method == "usp" && ranks % 2) continue;
          const char* const orders[] = {"contiguous", "zigzag", "stripes", "balanced"};
          const Case c{method, orders[(ranks + mask.name().size()) % 4], mask, packed, static_cast<int64_t>(packed.size()), 6,
                       ranks % 2 ? 6 : 2};
          CAPTURE(ranks, method, c.order, mask.name(), packed.size());
          REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) {
            check_rank(c, ranks, at::kDouble, 1e-12);
            check_rank(c, ranks, at::kFloat, 1e-6);
          }));
        }
      }
    }
  }
}
