// Gradients that are reduced while others are computed: small ones together, and added when they are there.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/words_of.hpp"

#include <range/v3/view/zip.hpp>

#include <optional>

namespace dt = dtensor;
using namespace dt::test;

namespace {

// Layers of two small parameters each, and one of more than a bucket takes of a single gradient.
torch::nn::Sequential layers(int64_t widest = 8) {
  torch::nn::Sequential net;
  for (int i = 0; i < 10; ++i) net->push_back(torch::nn::Linear(8, 8));
  net->push_back(torch::nn::Linear(8, widest));
  return net;
}

void train(torch::nn::Sequential& net, const at::Tensor& x, int steps, bool reset) {
  for (int i = 0; i < steps; ++i) {
    for (auto& p : net->parameters()) {
      if (reset) p.mutable_grad().reset();
      if (!reset && p.grad().defined()) p.grad().zero_();
    }
    net->forward(x).square().mean().backward();
  }
}

}  // namespace

TEST_CASE("gradient buckets: small gradients are one message", "[gradients]") {
  const char* transport = GENERATE("threads", "gloo");
  const bool reset = GENERATE(true, false);
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    torch::manual_seed(1);
    auto net = layers(10'000);  // its weight has 320 KB
    auto x = dt::distribute_tensor(torch::randn({6, 8}), mesh, {dt::shard(0)}).tensor();
    train(net, x, 1, reset);
    for (const auto& p : net->parameters()) dt::DTensor(p.grad()).to_local();
    dt::CommDebugMode comm;
    train(net, x, 1, reset);
    expect(comm, 2, "the widest weight, and 21 others");
    for (const auto& p : net->parameters()) {
      if (world.rank() == 1) dt::DTensor(p.grad()).to_local();
    }
    expect(comm, 2, "a rank may read by itself");
  }, transport));
}

TEST_CASE("gradient buckets: the bits are those of single reductions", "[gradients]") {
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World&) {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    dt::Spmd spmd(mesh);
    torch::manual_seed(1);
    auto net = layers();
    const auto x = torch::randn({8, 8});
    const auto gradients = [&](const dt::Placements& batch, bool alone) {
      std::vector<at::Tensor> all;
      std::optional<dt::NoSync> defer;
      if (alone) defer.emplace();
      train(net, dt::distribute_tensor(dt::full_tensor(x), mesh, batch).tensor(), 1, true);
      for (const auto& p : net->parameters()) all.push_back(dt::full_tensor(p.grad()));
      return all;
    };
    for (const auto& batch :
         {dt::Placements{dt::shard(0), dt::replicate()}, {dt::replicate(), dt::shard(0)}, {dt::shard(0), dt::shard(0)}}) {
      const auto together = gradients(batch, false), alone = gradients(batch, true);
      for (const auto& [got, expected] : ranges::views::zip(together, alone)) same(got, expected, "a gradient");
    }
  }));
}

TEST_CASE("gradient buckets: several backward passes add up", "[gradients]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    torch::manual_seed(1);
    auto net = layers();
    const auto x = dt::distribute_tensor(torch::randn({4, 8}), mesh, {dt::shard(0)}).tensor();
    train(net, x, 1, true);
    std::vector<at::Tensor> once;
    for (const auto& p : net->parameters()) once.push_back(dt::full_tensor(p.grad()).clone());
    for (auto& p : net->parameters()) p.mutable_grad().reset();
    std::vector<at::Tensor> seen;
    for (int pass = 0; pass < 3; ++pass) {
      net->forward(x).square().mean().backward();
      if (pass == 0) {
        for (const auto& p : net->parameters()) seen.push_back(p.grad());
      }
    }
    for (size_t i = 0; i < once.size(); ++i) {
      const auto p = net->parameters()[i];
      dt::require(p.grad().is_same(seen[i]), "test", "gradient {} is another tensor", i);
      same(dt::full_tensor(p.grad()), once[i] + once[i] + once[i], "three passes");
    }
    // A tensor that somebody else sees too is added to at once.
    auto p = net->parameters()[0];
    const auto view = p.grad().view({-1});
    const auto before = dt::full_tensor(p.grad()).clone();
    net->forward(x).square().mean().backward();
    same(dt::full_tensor(view).view_as(before), before + once[0], "a view of a gradient");
  }));
}

TEST_CASE("gradient buckets: a backward pass that fails", "[gradients]") {
  std::vector<at::Tensor> left(2);
  std::vector<std::string> first(2), again(2);
  const auto error_of = [](const at::Tensor& gradient) { return words_of([&] { dt::DTensor(gradient).to_local(); }); };
  CHECK_THROWS_WITH(on_ranks(2, [&](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    dt::set_replication_check(false);  // which would wait for the other rank before the gradients are read
    torch::nn::Linear below(3, 3), above(3, 3);
    const auto y = below(dt::distribute_tensor(torch::ones({4, 3}), mesh, {dt::shard(0)}).tensor());
    y.register_hook([&](const at::Tensor& gradient) {
      dt::require(world.rank() == 0, "test", "out of cheese");
      return gradient;
    });
    try {
      above(y).sum().backward();
      first[world.rank()] = error_of(above->weight.grad());
      again[world.rank()] = error_of(above->weight.grad());
      left[world.rank()] = above->weight.grad();
    } catch (const c10::Error&) {
      left[world.rank()] = above->weight.grad();
      throw;
    }
  }), says("out of cheese"));
  CHECK_THAT(first[0], says("rank 1 failed"));
  CHECK(first[0] == again[0]);
  CHECK_THROWS_WITH(dt::DTensor(left[1]).to_local(), says("was not begun when its World ended"));
}

TEST_CASE("gradient buckets: passes after one that threw on all ranks", "[gradients]") {
  const char* transport = GENERATE("threads", "gloo");
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    dt::set_replication_check(false);
    auto net = layers();
    const auto x = dt::distribute_tensor(torch::ones({4, 8}), mesh, {dt::shard(0)}).tensor();
    for (int pass = 0; pass < 20; ++pass) {
      bool threw = false;
      const auto below = net[0]->as<torch::nn::Linear>()->forward(x);
      below.register_hook([](const at::Tensor& gradient) -> at::Tensor { dt::fail("test", "out of cheese, {}", gradient.dim()); });
      auto y = below;
      for (size_t i = 1; i < net->size(); ++i) y = net[i]->as<torch::nn::Linear>()->forward(y);
      try {
        y.sum().backward();
      } catch (const c10::Error&) {
        threw = true;
      }
      dt::require(threw, "test", "the hook did not throw");
      dt::CommDebugMode comm;
      train(net, x, 1, true);
      expect(comm, 1, "a message, when the pass has ended");
    }
  }, transport));
}

TEST_CASE("gradient buckets: a pass in which some ranks have empty parts only", "[gradients]") {
  const char* transport = GENERATE("threads", "gloo");
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World&) {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {2, 2}, {"row", "column"});
    const auto leaf = [&](int64_t rows, dt::Placement by_row) {
      return dt::distribute_tensor(torch::ones({rows, 4}), mesh, {by_row, dt::replicate()}).tensor().requires_grad_();
    };
    const auto a = leaf(1, dt::replicate()), b = leaf(2, dt::replicate()), of_first_row = leaf(1, dt::shard(0));
    const auto over_rows = dt::distribute_tensor(torch::ones({4, 4}), mesh, {dt::shard(0), dt::replicate()}).tensor();
    const auto over_columns = dt::distribute_tensor(torch::ones({4, 4}), mesh, {dt::replicate(), dt::shard(1)}).tensor();
    const auto beside = dt::distribute_tensor(torch::ones({1, 4}), mesh, {dt::shard(0), dt::shard(1)}).tensor();
    for (const auto& [all, first] : {std::pair{true, true}, {false, true}, {true, false}, {true, true}}) {
      at::Tensor loss;
      if (all) loss = (over_rows * a).sum() + over_rows.mm(b.t()).sum();
      const auto product = (of_first_row.mm(over_columns) * beside).sum();
      if (first) loss = loss.defined() ? loss + product : product;
      for (const auto& p : {a, b, of_first_row}) p.mutable_grad().reset();
      loss.backward();
      for (const auto& p : {a, b, of_first_row}) {
        if (p.grad().defined()) same(dt::full_tensor(p.grad()), at::full(p.sizes(), 4.0), "a gradient");
      }
    }
  }, transport));
}

TEST_CASE("gradient buckets: memory that somebody else sees is added to at once", "[gradients]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    torch::nn::Linear layer(3, 3);
    std::vector<float> memory(9, 1.0f);
    layer->weight.mutable_grad() = dt::from_local(torch::from_blob(memory.data(), {3, 3}), mesh, {dt::replicate()}).tensor();
    layer(dt::distribute_tensor(torch::ones({4, 3}), mesh, {dt::shard(0)}).tensor()).sum().backward();
    dt::require(memory == std::vector<float>(9, 5.0f), "test", "the memory has {}", memory[0]);
  }));
}

TEST_CASE("gradient buckets: parts may lie in memory in another order on each rank", "[gradients]") {
  const char* transport = GENERATE("threads", "gloo");
  const auto run = [](const at::Tensor& row, const at::Tensor& pair) {
    const auto gate = at::glu(pair).unfold(0, 1, 2);  // whose gradient, the last one, is gathered
    const auto column = row.t();
    const auto grid = at::meshgrid({column.flatten().slice(0, 0, 4), column.flatten().slice(0, 0, 3)}, "ij")[0];
    (grid.sum() + row.flatten().sum() + gate.sum()).backward();
  };
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto mesh = line(world);
    const auto row = torch::arange(2, torch::kDouble).view({1, 2}), pair = torch::arange(2, torch::kFloat);
    const auto leaf = [&](const at::Tensor& x, const dt::Placement& lies) {
      return dt::distribute_tensor(x, mesh, {lies}).tensor().detach().requires_grad_();
    };
    const auto on_mesh = leaf(row, dt::replicate()), pair_on_mesh = leaf(pair, dt::shard(0));
    run(on_mesh, pair_on_mesh);
    const auto expected = row.clone().requires_grad_(), expected_pair = pair.clone().requires_grad_();
    run(expected, expected_pair);
    same(dt::full_tensor(on_mesh.grad()), expected.grad(), "the row's gradient");
    same(dt::full_tensor(pair_on_mesh.grad()), expected_pair.grad(), "the pair's gradient");
  }, transport));
}

// A sum with an expanded gradient lies in memory as that one does on the ranks, and is reported in row-major order.
TEST_CASE("gradient buckets: a sum with an expanded gradient", "[gradients]") {
  const char* transport = GENERATE("threads", "gloo");
  const int after = GENERATE(0, 1);
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {1, 2}, {"a", "b"});
    const auto numbers = torch::arange(27, torch::kFloat) * (world.rank() + 1);
    dt::Spmd spmd(mesh);
    const at::Tensor leaf = dt::distribute_tensor(torch::zeros({3, 9}), mesh, {dt::shard(0), dt::replicate()});
    leaf.requires_grad_();
    const at::Tensor row = leaf.view({27}), turned = leaf.t();
    const at::Tensor of_row = dt::from_local(numbers, mesh, {dt::replicate(), dt::partial()});
    const auto of_turned = dt::redistribute(torch::ones({}).expand({9, 3}), {dt::shard(1), dt::replicate()});
    if (after) torch::autograd::backward({turned, row}, {of_turned, of_row});
    else torch::autograd::backward({row, turned}, {of_row, of_turned});
    const dt::NoSpmd plain;
    same(dt::full_tensor(leaf.grad()), torch::arange(27, torch::kFloat).mul(3).add(1).view({3, 9}), "the gradient");
  }, transport));
}
