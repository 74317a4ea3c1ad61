// Linear layers in pieces that overlap with their collective: values and gradients of one device, and what is communicated.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <functional>

using namespace dtensor;
using namespace dtensor::test;

namespace {

struct MeshShape {
  std::vector<int64_t> mesh;
  std::vector<std::string> names;
  Placements input;  // [4, 8, 6], of the block
};

at::Tensor doubles(c10::IntArrayRef sizes, int64_t seed) { return fractions(sizes, seed).to(at::kDouble); }

// Two layers beside each other, with biases, and one after them.
struct GatedBlockImpl : torch::nn::Module {
  GatedBlockImpl() {
    up = register_module("up", torch::nn::Linear(6, 8)), gate = register_module("gate", torch::nn::Linear(6, 8));
    down = register_module("down", torch::nn::Linear(8, 6));
    to(at::kDouble);
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    for (auto& parameter : parameters()) parameter.copy_(doubles(parameter.sizes(), ++seed));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto gated = gather_linear(x, {up, gate});
    return linear_reduce(gated[0] * gated[1].tanh(), down, x);
  }
  torch::nn::Linear up{nullptr}, gate{nullptr}, down{nullptr};
};
TORCH_MODULE(GatedBlock);

struct OverlapStep {
  at::Tensor output, of_input;
  std::vector<at::Tensor> gradients;
};

OverlapStep overlap_step(GatedBlock& block, at::Tensor x) {
  x.requires_grad_();
  const auto y = block->forward(x);
  (y * y).sum().backward();
  OverlapStep result{full_tensor(y), full_tensor(x.grad()), {}};
  for (const auto& parameter : block->parameters()) result.gradients.push_back(full_tensor(parameter.grad()));
  return result;
}

void require_same_step(const OverlapStep& got, const OverlapStep& wanted) {
  const auto same = [](const char* what, const at::Tensor& a, const at::Tensor& b) {
    require(a.sizes() == b.sizes() && a.allclose(b, 1e-12, 1e-12), "test", "{} differs by {}", what, (a - b).abs().max().item<double>());
  };
  same("the output", got.output, wanted.output);
  same("the input's gradient", got.of_input, wanted.of_input);
  for (size_t i = 0; i < wanted.gradients.size(); ++i) same("a gradient", got.gradients[i], wanted.gradients[i]);
}

Plan pair_plan() { return tensor_parallel({{"up|gate", ColwiseParallel()}, {"down", RowwiseParallel()}}); }

void with_cut_block(int ranks, const std::function<void(const DeviceMesh&, GatedBlock&)>& body) {
  on_ranks(ranks, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"tp"});
    const Spmd spmd(mesh);
    GatedBlock block;
    parallelize_module(*block, mesh, pair_plan());
    body(mesh, block);
  });
}

void check_overlap(const MeshShape& shape, int64_t pieces, int64_t batch, bool sharded, const std::string& transport) {
  GatedBlock alone;
  const auto input = doubles({batch, 8, 6}, 9);
  const auto wanted = overlap_step(alone, input.clone());
  int count = 1;
  for (const auto size : shape.mesh) count *= static_cast<int>(size);
  on_ranks(count, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, shape.mesh, shape.names);
    const Spmd spmd(mesh);
    GatedBlock block;
    parallelize_module(*block, mesh, pair_plan());
    if (sharded) fully_shard(*block, mesh["dp"]);
    const OverlapLinear overlap(pieces);
    CommDebugMode comm;
    require_same_step(overlap_step(block, distribute_tensor(input, mesh, shape.input).tensor()), wanted);
    if (count > 2 || sharded || !shape.input.back().is_shard(1)) return;
    const auto gathered = comm.count(comm::Collective::all_gather), scattered = comm.count(comm::Collective::reduce_scatter);
    require(scattered == 2 * pieces && gathered >= 2 * pieces, "test", "not in {} pieces: {}", pieces, comm.str());  // others are looked at
  }, transport);
}

}  // namespace

TEST_CASE("overlap: a block in pieces has the values and gradients of one device", "[overlap]") {
  const auto r = replicate(), rows = shard(0), positions = shard(1);
  for (const int64_t pieces : {2, 3, 8}) {
    for (const int64_t batch : {1, 4}) {
      CAPTURE(pieces, batch);
      REQUIRE_NOTHROW(check_overlap({{2}, {"tp"}, {r}}, pieces, batch, false, "threads"));
      REQUIRE_NOTHROW(check_overlap({{2}, {"tp"}, {positions}}, pieces == 8 ? 4 : pieces, batch, false, "threads"));
      REQUIRE_NOTHROW(check_overlap({{4}, {"tp"}, {positions}}, pieces, batch, false, "gloo"));
      if (batch == 1) continue;
      REQUIRE_NOTHROW(check_overlap({{2, 2}, {"dp", "tp"}, {rows, r}}, pieces, batch, false, "threads"));
      REQUIRE_NOTHROW(check_overlap({{2, 2}, {"dp", "tp"}, {rows, positions}}, pieces, batch, false, "threads"));
      REQUIRE_NOTHROW(check_overlap({{2, 2}, {"dp", "tp"}, {rows, positions}}, pieces, batch, true, "threads"));
      REQUIRE_NOTHROW(check_overlap({{2, 2}, {"dp", "tp"}, {rows, r}}, pieces, batch, true, "threads"));
      REQUIRE_NOTHROW(check_overlap({{2, 2}, {"tp", "dp"}, {positions, rows}}, pieces, batch, false, "threads"));
    }
  }
}

TEST_CASE("overlap: what cannot be cut evenly is computed as without", "[overlap]") {
  const auto input = doubles({1, 7, 6}, 9);
  GatedBlock alone;
  const auto wanted = overlap_step(alone, input.clone());
  REQUIRE_NOTHROW(with_cut_block(3, [&](const DeviceMesh& mesh, GatedBlock& block) {
    const OverlapLinear overlap(2);
    require_same_step(overlap_step(block, distribute_tensor(input, mesh, {shard(1)}).tensor()), wanted);
  }));
}

TEST_CASE("overlap: what is frozen or unused gets no gradient", "[overlap]") {
  REQUIRE_NOTHROW(with_cut_block(2, [](const DeviceMesh& mesh, GatedBlock& block) {
    block->gate->weight.requires_grad_(false);
    const OverlapLinear overlap(2);
    const auto x = distribute_tensor(doubles({1, 8, 6}, 9), mesh, {shard(1)}).tensor();
    const auto gated = gather_linear(x, {block->up, block->gate});
    linear_reduce(gated[1], block->down, x).sum().backward();  // gated[0] leads nowhere
    const auto has = [](const at::Tensor& parameter) { return parameter.grad().defined(); };
    require(
        !has(block->up->weight) && !has(block->up->bias) && !has(block->gate->weight) && has(block->gate->bias) && has(block->down->weight),
        "test", "other gradients");
    const auto wanted = full_tensor(block->down->weight.detach()).sum(0);
    require(full_tensor(block->gate->bias.grad()).allclose(wanted.mul(8)), "test", "the bias's gradient differs");
  }));
}

TEST_CASE("overlap: an input that was written before the backward pass is noticed", "[overlap][errors]") {
  REQUIRE_THROWS_WITH(with_cut_block(2, [](const DeviceMesh& mesh, GatedBlock& block) {
    const OverlapLinear overlap(2);
    auto x = distribute_tensor(doubles({1, 8, 6}, 9), mesh, {replicate()}).tensor() * 1;
    const auto y = gather_linear(x, {block->up})[0];
    x.mul_(100);
    y.sum().backward();
  }), says("modified by an inplace operation"));
}

TEST_CASE("overlap: a checkpoint computes again in as many pieces", "[overlap]") {
  REQUIRE_NOTHROW(with_cut_block(2, [](const DeviceMesh& mesh, GatedBlock& block) {
    const auto x = distribute_tensor(doubles({1, 8, 6}, 9), mesh, {shard(1)}).tensor().requires_grad_();
    const auto y = [&] {
      const OverlapLinear overlap(2);
      return checkpoint([&](const at::Tensor& input) { return block->forward(input); }, x);
    }();
    y.sum().backward();
    const auto again = x.grad().clone();
    x.mutable_grad().reset();
    block->forward(x).sum().backward();
    require(full_tensor(again).allclose(full_tensor(x.grad())), "test", "the gradient differs");
  }));
}

TEST_CASE("overlap: does nothing to plain tensors", "[overlap]") {
  GatedBlock block;
  const auto input = doubles({1, 8, 6}, 9);
  const auto wanted = overlap_step(block, input.clone());
  for (auto& parameter : block->parameters()) parameter.mutable_grad().reset();
  const OverlapLinear overlap(4);
  const auto got = overlap_step(block, input.clone());
  REQUIRE(got.output.equal(wanted.output));
  REQUIRE(got.of_input.equal(wanted.of_input));
}

TEST_CASE("overlap: no pieces and a second backward pass are refused", "[overlap][errors]") {
  REQUIRE_THROWS_WITH(OverlapLinear(0), says("one piece or more"));
  REQUIRE_THROWS_WITH(with_cut_block(2, [](const DeviceMesh& mesh, GatedBlock& block) {
    const OverlapLinear overlap(2);
    const auto x = doubles({1, 8, 6}, 9).requires_grad_();
    const auto y = block->forward(distribute_tensor(x, mesh, {shard(1)}));
    torch::autograd::grad({y.sum()}, {block->up->weight}, {}, c10::nullopt, true);
  }), says("create_graph"));
}
