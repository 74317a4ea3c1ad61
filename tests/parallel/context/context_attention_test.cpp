// Attention over cut sequences, by every method under every mask, against one device.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/parallel/context/attention.hpp>

#include <torch/torch.h>

#include <array>
#include <cstdlib>
#include <random>

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
  int neighbours = 2;  // of methods that take a mesh of two dimensions
};

bool takes_two(const std::string& method) { return method == "usp" || method == "doublering"; }

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

// Of each result, relative to the largest element of the whole; where that is nothing but rounding, to the size of the inputs' products.
void check_rank(const Case& c, int ranks, at::ScalarType dtype, double most, double most_of_gradients = 0) {
  const NoSpmd plain;
  const auto flat = init_device_mesh(c10::kCPU, {ranks}, {"cp"});
  const auto mesh = takes_two(c.method) ? init_device_mesh(c10::kCPU, {ranks / c.neighbours, c.neighbours}, {"far", "near"}) : flat;
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
  const auto check = [&](const char* what, const at::Tensor& got, const at::Tensor& whole, double most) {
    require(got.scalar_type() == dtype, "test", "{} is {}", what, c10::toString(got.scalar_type()));
    const auto difference = largest_difference(got, whole.index_select(2, rows)) / std::max(1e-2, whole.abs().max().item<double>());
    require(difference <= most, "test", "{} differs by {}", what, difference);
  };
  check("the output", out, expected.out, most);
  most_of_gradients = std::max(most, most_of_gradients);
  check("dq", own[0].grad(), expected.dq, most_of_gradients);
  check("dk", own[1].grad(), expected.dk, most_of_gradients);
  check("dv", own[2].grad(), expected.dv, most_of_gradients);
}

std::vector<AttentionMask> all_masks(int64_t documents) {
  std::vector<int64_t> prefixes;
  std::vector<Interval> runs;
  for (int64_t d = 0; d < documents; ++d) {
    prefixes.push_back(d * 2);
    runs.push_back({d / 3, d});
  }
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
          AttentionMask::shared_runs(runs),
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
        for (const std::string method : {"ring", "doublering", "allgather", "ulysses", "usp", "tokenring"}) {
          if (takes_two(method) && ranks % 2) continue;
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

// Sums are float32 and the output is rounded once: by half of the last place at most. The gradients' scores also take it as it was rounded,
// which is an error of that size for each dim.
TEST_CASE("context attention: half types differ from float64 by their rounding", "[context]") {
  const std::vector<PackedSequence> packed{PackedSequence({4, 9, 11}), PackedSequence({12, 7, 5})};
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& mask : {AttentionMask::full(), AttentionMask::causal_documents(), AttentionMask::sliding_window(3, 2)}) {
      for (const std::string method : {"ring", "doublering", "allgather", "ulysses", "usp", "tokenring", "automatic"}) {
        if (takes_two(method) && ranks % 2) continue;
        const Case c{method, ranks % 2 ? "zigzag" : "stripes", mask, packed, 2, 6, ranks % 2 ? 6 : 2};
        CAPTURE(ranks, method, c.order, mask.name());
        REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) {
          check_rank(c, ranks, at::kBFloat16, 0x1.01p-8, 0x1p-7);
          check_rank(c, ranks, at::kHalf, 0x1.01p-11, 0x1p-10);
        }));
      }
    }
  }
}

// 2,000 by DTENSOR_TEST_CASES=2000 build/tests/dtensor-tests "context attention: random*".
TEST_CASE("context attention: random masks and layouts by random methods give one device's numbers", "[context]") {
  const char* asked = std::getenv("DTENSOR_TEST_CASES");
  for (int seed = 0; seed < (asked ? std::atoi(asked) : 40); ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(random); };
    const int ranks = std::array{1, 2, 3, 4, 8}[draw(0, 4)];
    std::vector<int64_t> documents;
    for (int64_t d = draw(1, 5); d > 0; --d) documents.push_back(draw(1, 40));
    std::vector<PackedSequence> packed{PackedSequence(documents)};
    if (std::ranges::shuffle(documents, random); draw(0, 1)) packed.emplace_back(documents);
    const auto numbers = draw(1, 1000000);
    const auto dense = static_cast<uint64_t>(draw(0, 8));
    const auto any = AttentionMask::from([=](int64_t q, int64_t k, int64_t a, int64_t b) {
      const auto hash = static_cast<uint64_t>((q * 7919 + k) * 104729 + (a == b) + numbers) * 2654435761 % 4294967296;
      return hash % 8 < dense && (q + numbers) % 11 != 0;
    });
    const auto known = all_masks(static_cast<int64_t>(documents.size()));
    const char* const methods[] = {"ring", "allgather", "ulysses", "tokenring", "automatic", "doublering", "usp"};
    const char* const orders[] = {"contiguous", "zigzag", "stripes", "balanced"};
    const auto key_heads = draw(1, 4);
    const Case c{methods[draw(0, ranks % 2 ? 4 : 6)],
                 orders[draw(0, 3)],
                 draw(0, 1) ? any : known[draw(0, static_cast<int64_t>(known.size()) - 1)],
                 packed,
                 static_cast<int64_t>(packed.size()),
                 key_heads * draw(1, 3),
                 key_heads};
    CAPTURE(seed, ranks, c.method, c.order, c.mask.name(), documents, packed.size(), c.heads, key_heads);
    REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) { check_rank(c, ranks, at::kDouble, 1e-12); }));
  }
}
