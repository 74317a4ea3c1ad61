// Dropout of attention weights over cut sequences: the same weights, whatever the method and the ranks.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/nn/attention.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

struct DropoutCase {
  std::string method;
  AttentionMask mask;
  int ranks;
  int64_t heads, key_heads;
};

constexpr int64_t kDroppedBatch = 2, kDroppedLength = 26;
const AttentionDropout kDropout{0.3, 12345};

// 0 where a weight is dropped: [batch, heads, length, length].
at::Tensor kept_weights(const AttentionDropout& dropout, int64_t heads) {
  const auto positions = context::contiguous_order(kDroppedLength, 1)[0];
  auto dropped = at::empty({kDroppedBatch, heads, kDroppedLength, kDroppedLength}, at::kBool);
  for (int64_t b = 0; b < kDroppedBatch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      context::detail::write_dropped(dropout, b, h, positions, positions, dropped[b][h].data_ptr<bool>());
    }
  }
  return dropped.logical_not().to(at::kDouble).mul(dropout.scale());
}

// Output and gradients of one device, with whole matrices of weights.
std::vector<at::Tensor> with_whole_weights(const DropoutCase& c, const PackedSequence& sequence, const std::vector<at::Tensor>& qkv,
                                           const at::Tensor& grad) {
  auto hidden = at::empty({kDroppedLength, kDroppedLength}, at::kBool);
  for (int64_t q = 0; q < kDroppedLength; ++q) {
    for (int64_t k = 0; k < kDroppedLength; ++k) hidden[q][k] = !c.mask.allows(q, k, sequence);
  }
  std::vector<at::Tensor> leaves;
  for (const auto& x : qkv) leaves.push_back(x.detach().requires_grad_());
  const auto repeated = [&](const at::Tensor& x) { return x.repeat_interleave(c.heads / c.key_heads, 1); };
  const auto scores = at::matmul(leaves[0], repeated(leaves[1]).transpose(2, 3)) / std::sqrt(static_cast<double>(qkv[0].size(3)));
  const auto weights = scores.masked_fill(hidden, -1e300).softmax(-1).masked_fill(hidden, 0).mul(kept_weights(kDropout, c.heads));
  const auto out = at::matmul(weights, repeated(leaves[2]));
  auto results = torch::autograd::grad({out}, leaves, {grad});
  results.insert(results.begin(), out.detach());
  return results;
}

void check_dropout(const DropoutCase& c) {
  const NoSpmd plain;
  const PackedSequence sequence({11, 3, 12});
  const bool two = c.method == "usp" || c.method == "doublering";
  const auto flat = init_device_mesh(c10::kCPU, {c.ranks}, {"cp"});
  const auto mesh = two ? init_device_mesh(c10::kCPU, {c.ranks / 2, 2}, {"far", "near"}) : flat;
  const ContextPlan plan(c.mask, {sequence}, context::striped_order(kDroppedLength, c.ranks, 3));
  const auto random = [&](int64_t heads, int seed) {
    torch::manual_seed(seed);
    return torch::randn({kDroppedBatch, heads, kDroppedLength, 5}, at::kDouble);
  };
  const std::vector<at::Tensor> qkv{random(c.heads, 1), random(c.key_heads, 2), random(c.key_heads, 3)};
  const auto grad = random(c.heads, 4);
  const auto expected = with_whole_weights(c, sequence, qkv, grad);
  const auto rows = at::tensor(plan.rows(flat.coordinate(0)), at::kLong);
  std::vector<at::Tensor> own;
  for (const auto& x : qkv) own.push_back(x.index_select(2, rows).requires_grad_());
  const auto out = context_attention(own[0], own[1], own[2], plan, mesh, {.method = c.method, .dropout = kDropout});
  out.backward(grad.index_select(2, rows));
  const at::Tensor got[] = {out, own[0].grad(), own[1].grad(), own[2].grad()};
  for (int i = 0; i < 4; ++i) {
    require(got[i].allclose(expected[i].index_select(2, rows), 1e-11, 1e-12), "test", "result {} differs", i);
  }
}

// Attention with dropout in a region on a mesh, by this rank's part of whole tensors; and what the stream gives next.
std::vector<at::Tensor> in_region(const DeviceMesh& mesh, const Placements& placements, const ContextParallelOptions& options,
                                  int64_t key_heads) {
  torch::manual_seed(7);
  const auto random = [](int64_t heads) {
    const NoSpmd plain;
    return torch::randn({4, heads, kDroppedLength, 4}, at::kDouble);
  };
  const auto q = random(4), k = random(key_heads), v = random(key_heads);
  ContextParallel context(mesh, "cp", options);
  std::vector<at::Tensor> leaves;
  for (const auto& x : {q, k, v}) {
    const auto ordered = context.order(x, 2);
    leaves.push_back(placements.empty() ? ordered.requires_grad_()
                                        : distribute_tensor(ordered, mesh, placements).tensor().detach().requires_grad_());
  }
  std::vector<at::Tensor> results;
  for (int layer = 0; layer < 2; ++layer) {
    const auto y = nn::attention(leaves[0], leaves[1], leaves[2], {.causal = true, .dropout = 0.4});
    y.square().sum().backward();
    results.push_back(context.restore(full_tensor(y).detach(), 2));
  }
  for (const auto& leaf : leaves) results.push_back(context.restore(full_tensor(leaf.grad()), 2));
  results.push_back(torch::rand({3}, at::kDouble));
  return results;
}

}  // namespace

TEST_CASE("context dropout: every method drops what one device drops", "[context]") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& mask : {AttentionMask::causal(), AttentionMask::documents(), AttentionMask::sliding_window(4, 2)}) {
      for (const std::string method : {"ring", "doublering", "allgather", "ulysses", "usp", "tokenring"}) {
        if ((method == "usp" || method == "doublering") && ranks % 2) continue;
        for (const int64_t key_heads : {2, 6}) {
          CAPTURE(ranks, mask.name(), method, key_heads);
          REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) { check_dropout({method, mask, ranks, 6, key_heads}); }));
        }
      }
    }
  }
}

TEST_CASE("context dropout: in a region a mesh has the numbers and the stream of one rank", "[context]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const std::string method : {"ring", "ulysses", "allgather", "tokenring"}) {
      CAPTURE(transport, method);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World& world) {
            const DeviceMesh self(c10::kCPU, {world.rank()}, {1}, {"cp"});
            const auto alone = in_region(self, {}, {}, 2);
            const auto check = [&](const std::vector<at::Tensor>& got) {
              for (size_t i = 0; i < alone.size(); ++i) {
                require(got[i].allclose(alone[i], 1e-11, 1e-12), "test", "result {} differs from one rank's", i);
              }
              require(!got[0].allclose(got[1], 1e-3, 1e-3), "test", "two calls drop the same weights");
            };
            check(in_region(init_device_mesh(c10::kCPU, {4}, {"cp"}), {shard(2)}, {method, "zigzag"}, 2));
            check(in_region(init_device_mesh(c10::kCPU, {2, 2}, {"cp", "tp"}), {shard(2), shard(1)}, {method, "stripes"}, 2));
            check(in_region(init_device_mesh(c10::kCPU, {2, 2}, {"dp", "cp"}), {shard(0), shard(2)}, {method, "zigzag"}, 2));
            check(in_region(init_device_mesh(c10::kCPU, {2, 2}, {"dp", "cp"}), {strided_shard(0, 2), shard(2)}, {method, "zigzag"}, 2));
          },
          transport));
    }
  }
}

TEST_CASE("context dropout: each weight is dropped by itself and as often as asked for", "[context]") {
  const auto positions = context::contiguous_order(512, 1)[0];
  const auto dropped = [&](double probability, uint64_t seed, int64_t row, int64_t head) {
    auto result = at::empty({512, 512}, at::kBool);
    context::detail::write_dropped({probability, seed}, row, head, positions, positions, result.data_ptr<bool>());
    return result;
  };
  const auto share = [](const at::Tensor& x) { return x.to(at::kDouble).mean().item<double>(); };
  for (const double p : {0.05, 0.3, 0.5}) {
    const auto one = dropped(p, 1, 0, 0);
    const double sigma = std::sqrt(p * (1 - p)) / 512;
    CHECK(std::abs(share(one) - p) < 4 * sigma);
    // Of another head, row or seed, of the next query and of the next key: as often both as chance has it.
    for (const auto& other : {dropped(p, 1, 0, 1), dropped(p, 1, 1, 0), dropped(p, 2, 0, 0), one.roll(1, 0), one.roll(1, 1)}) {
      const double both = p * p;
      CHECK(std::abs(share(one.logical_and(other)) - both) < 4 * std::sqrt(both * (1 - both)) / 512);
    }
  }
  CHECK(share(dropped(0, 1, 0, 0)) == 0);
  CHECK(share(dropped(1, 1, 0, 0)) == 1);
}

TEST_CASE("context dropout: what is no dropout is refused on every rank", "[context][errors]") {
  const auto refused = [](const std::string& text, const std::function<void(const ContextPlan&, const DeviceMesh&)>& call) {
    CAPTURE(text);
    REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
      const NoSpmd plain;
      const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
      const ContextPlan plan(AttentionMask::causal(), {PackedSequence(8)}, context::contiguous_order(8, 2));
      try {
        call(plan, mesh);
      } catch (const c10::Error& error) {
        return require(says(text).match(error.what()), "test", "it says: {}", error.what());
      }
      fail("test", "it was taken");
    }));
  };
  const auto x = torch::ones({1, 2, 4, 3});
  for (const double probability : {-0.1, 1.5, std::nan("")}) {
    refused("expected a probability, from 0 to 1",
            [&](const auto& plan, const auto& mesh) { context_attention(x, x, x, plan, mesh, {.dropout = {probability}}); });
  }
  refused("for queries [1, 2, 4, 3]; expected a number for each", [&](const auto& plan, const auto& mesh) {
    context_attention(x, x, x, plan, mesh, {.dropout = {0.5, 1, {}, {0, 1, 2}}});
  });
  refused("have drifted apart", [&](const auto&, const auto& mesh) {
    torch::manual_seed(World::current().rank());
    ContextParallel context(mesh, "cp", {.order = "contiguous"});
    const auto y = distribute_tensor(torch::ones({1, 1, 8, 2}), mesh, {shard(2)});
    nn::attention(y, y, y, {.dropout = 0.5});
  });
}
