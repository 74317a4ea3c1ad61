// fully_shard and what programs do with parameters: views, hooks, kept gradients, other orders of use, checkpointing.
#include "tests/support/fully_shard_support.hpp"

#include <fmt/ranges.h>

#include <optional>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::test::sharding;

TEST_CASE("fully shard: units are gathered where communication is explicit", "[fsdp]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    const auto sharded = fully_shard(*net, mesh);
    const auto input = distribute_tensor(fractions({6, 12}), mesh, {shard(0)});
    const auto region = explicit_communication();
    net->blocks[0]->as<Block>()->forward(input.tensor()).sum().backward();
    require(sharded.gathers() > 0 && sharded.reductions() == 1, "test", "{} gathers, {} reductions", sharded.gathers(),
            sharded.reductions());
  }));
}

// The same on one device and on a mesh of dp x tp ranks, of a Linear layer whose weight is cut so over tp and then sharded.
void check_views(const std::vector<int64_t>& sizes, const Placement& cut, const std::vector<std::vector<int64_t>>& views) {
  const auto values = [&](const at::Tensor& weight) {
    std::vector<at::Tensor> results;
    for (const auto& view : views) {
      const auto part = weight.view(view).select(0, 1).mul(2).sum();
      results.push_back(part.detach());
      part.backward();
    }
    results.push_back(weight.grad());
    return results;
  };
  const auto weight = fractions(sizes).requires_grad_();
  const auto expected = values(weight);
  CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& plain) {
    const DeviceMesh mesh(c10::kCPU, plain.ranks(), {2, 2}, {"dp", "tp"});
    Spmd spmd(mesh);
    nn::Linear layer(nn::LinearOptions(sizes[1], sizes[0]).bias(false));
    {
      at::NoGradGuard no_grad;
      layer->weight.copy_(fractions(sizes));
    }
    parallelize_module(*layer, mesh, {{"weight", {{"tp", cut}}}});
    fully_shard(*layer, mesh["dp"]);
    const auto got = values(layer->weight);
    for (size_t i = 0; i < got.size(); ++i) {
      require(full_tensor(got[i]).allclose(expected[i], 1e-6, 1e-6), "test", "result {} of {} cut as {} is {}", i, sizes, cut.str(),
              full_tensor(got[i]).sum().item<double>());
    }
  }));
}

TEST_CASE("fully shard: views of a weight that move what tensor parallelism cut", "[fsdp]") {
  check_views({10, 6}, shard(0), {{5, 12}, {15, 4}});
  check_views({6, 10}, shard(1), {{5, 12}, {6, 5, 2}});
  check_views({12, 6}, shard(0), {{3, 4, 6}, {4, 3, 6}});
  check_views({6, 12}, shard(1), {{6, 3, 4}, {2, 3, 12}});
  check_views({18, 6}, strided_shard(0, 3), {{3, 6, 6}, {3, 2, 3, 6}});
}

TEST_CASE("fully shard: hooks of gradients get what backward brings", "[fsdp]") {
  const auto seen_and_summed = [](nn::Linear& layer, const at::Tensor& x, bool no_sync) {
    std::vector<double> seen;
    layer->weight.register_hook([&seen](const at::Tensor& gradient) {
      seen.push_back(full_tensor(gradient).sum().item<double>());
      return gradient * 2;
    });
    for (int i = 0; i < 3; ++i) {
      std::optional<NoSync> kept;
      if (no_sync && i < 2) kept.emplace();
      layer(x).sum().backward();
    }
    seen.push_back(full_tensor(layer->weight.grad()).sum().item<double>());
    return seen;
  };
  nn::Linear plain(nn::LinearOptions(3, 1).bias(false));
  const auto expected = seen_and_summed(plain, torch::ones({4, 3}), false);
  for (const bool shards : {false, true}) {
    for (const bool no_sync : {false, true}) {
      CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
        Spmd spmd(mesh);
        nn::Linear layer(nn::LinearOptions(3, 1).bias(false));
        if (shards) fully_shard(*layer, mesh);
        const auto got = seen_and_summed(layer, distribute_tensor(torch::ones({4, 3}), mesh, {shard(0)}), no_sync);
        require(got == expected, "test", "shards {}, NoSync {}: {}, expected {}", shards, no_sync, got, expected);
      }));
    }
  }
}

TEST_CASE("fully shard: a gradient that is kept stays as it is", "[fsdp]") {
  for (const bool late : {false, true}) {
    CHECK_NOTHROW(on_mesh({2}, [late](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      nn::Linear layer(4, 4);
      fully_shard(*layer, mesh, with([late](auto& o) { o.reduce_at_read = late; }));
      const auto x = distribute_tensor(torch::ones({4, 4}), mesh, {shard(0)});
      const auto sum = [](const at::Tensor& tensor) { return full_tensor(tensor).sum().item<double>(); };
      for (const bool read : {true, false}) {
        for (const int backwards : {1, 2}) {
          layer->zero_grad();
          layer->weight.mutable_grad() = layer->bias.mutable_grad() = at::Tensor();
          for (int i = 0; i < backwards; ++i) layer(x.tensor()).sum().backward();
          if (read) require(sum(layer->weight.grad()) == 64 * backwards, "test", "{} after {}", sum(layer->weight.grad()), backwards);
          const auto kept = layer->weight.grad();
          layer->weight.mutable_grad() = at::Tensor();
          layer(x.tensor()).mul(3).sum().backward();
          const std::vector<double> got{sum(layer->weight.grad()), sum(kept), sum(layer->bias.grad())};
          const std::vector<double> expected{192, 64.0 * backwards, 16.0 * (backwards + 3)};
          require(got == expected, "test", "late {}, read {}: {}, expected {}", late, read, got, expected);
        }
      }
    }));
  }
}

TEST_CASE("fully shard: a gradient that autograd::grad gives is nobody else's", "[fsdp][gradients]") {
  for (const bool shards : {false, true}) {
    for (const bool no_sync : {false, true}) {
      CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
        Spmd spmd(mesh);
        nn::Linear layer(nn::LinearOptions(3, 2).bias(false));
        if (shards) fully_shard(*layer, mesh);
        const auto x = distribute_tensor(torch::ones({4, 3}), mesh, {shard(0)}).tensor();
        {
          std::optional<NoSync> kept;
          if (no_sync) kept.emplace();
          layer(x).sum().backward();
        }
        const auto other = torch::autograd::grad({layer(x).mul(5).sum()}, {layer->weight})[0];
        require(layer->weight.grad().defined(), "test", "the leaf's gradient is gone");
        require(full_tensor(other).eq(20).all().item<bool>() && full_tensor(layer->weight.grad()).eq(4).all().item<bool>(), "test",
                "shards {}, NoSync {}: {} and {}", shards, no_sync, full_tensor(other).max().item<double>(),
                full_tensor(layer->weight.grad()).max().item<double>());
      }));
    }
  }
}

TEST_CASE("fully shard: gradients that can be differentiated again are divided too", "[fsdp][gradients]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    nn::Linear layer(nn::LinearOptions(3, 2).bias(false));
    fully_shard(*layer, mesh, with([](auto& o) { o.gradient_divide_factor = 2; }));
    layer->weight.pow(2).sum().backward({}, c10::nullopt, true);
    require(full_tensor(layer->weight.grad()).equal(full_tensor(layer->weight.detach())), "test", "{}",
            full_tensor(layer->weight.grad()).max().item<double>());
    layer->weight.mutable_grad().reset();  // which holds the weight by its graph, and the weight it
  }));
}

// Writes that need the whole weight gather its unit, before it has what is written.
TEST_CASE("fully shard: a weight that was written as a whole is used as written", "[fsdp]") {
  const std::vector<std::pair<const char*, std::function<void(at::Tensor&)>>> writes{
      {"div_ by norms", [](at::Tensor& w) { w.div_(w.norm(2, {1}, true)); }},
      {"tril_", [](at::Tensor& w) { w.tril_(); }},
      {"copy_ of the transposed", [](at::Tensor& w) { w.copy_(w.t().clone()); }},
      {"index_fill_", [](at::Tensor& w) { w.index_fill_(1, torch::tensor({1, 2}), 3); }},
      {"renorm_", [](at::Tensor& w) { w.renorm_(2, 0, 0.5); }},
      {"mul_ of a row", [](at::Tensor& w) { w.select(0, 1).mul_(w.select(0, 2)); }},
  };
  const auto values = fractions({4, 4}) + 0.25, input = fractions({6, 4});
  for (const auto& [name, write] : writes) {
    INFO(name);
    const auto outputs = [&, write = write](nn::Linear& layer, const at::Tensor& x) {
      at::NoGradGuard no_grad;
      layer->weight.copy_(values);
      std::vector<at::Tensor> all{layer(x)};
      for (int i = 0; i < 2; ++i) {
        write(layer->weight);
        all.push_back(layer(x));
      }
      for (auto& output : all) output = full_tensor(output).clone();
      return all;
    };
    nn::Linear plain(nn::LinearOptions(4, 4).bias(false));
    const auto expected = outputs(plain, input);
    for (const auto* transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_mesh(
          {2},
          [&](const DeviceMesh& mesh) {
            Spmd spmd(mesh);
            nn::Linear layer(nn::LinearOptions(4, 4).bias(false));
            fully_shard(*layer, mesh);
            compare("output", outputs(layer, distribute_tensor(input, mesh, {shard(0)}).tensor()), expected, 1e-6);
          },
          transport));
    }
  }
}

TEST_CASE("fully shard: ranks that use units in another order are found out", "[fsdp][errors]") {
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_THROWS_WITH(on_mesh({2}, [](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      Net net;
      const auto sharded = fully_shard(*net, mesh);
      const auto input = distribute_tensor(ids(0), mesh, {shard(0)});
      const auto order = mesh.coordinate(0) == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{2, 1, 0};
      loss_of(net, input, order).item<double>();
    }, transport), says("the ranks diverged") && says("for 'blocks"));
  }
}

TEST_CASE("fully shard: a module is converted before", "[fsdp][errors]") {
  CHECK_THROWS_WITH(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    fully_shard(*net, mesh);
    net->to(at::kDouble);
  }), says("call to() before fully_shard"));
}

TEST_CASE("fully shard: checkpointing gathers units", "[fsdp]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    const auto sharded = fully_shard(*net, mesh);
    const auto input = distribute_tensor(fractions({6, 12}), mesh, {shard(0)});
    CheckpointOptions selective;
    selective.save = matrix_products();
    CommDebugMode traffic;
    auto x = input.tensor();
    for (int i = 0; i < 3; ++i) {
      auto* block = net->blocks[i]->as<Block>();
      x = checkpoint(selective, [block](const at::Tensor& y) { return block->forward(y); }, x);
    }
    require(traffic.count(comm::Collective::all_gather) == 3, "test", "forward:\n{}", traffic.str());
    x.sum().backward();
    require(traffic.count(comm::Collective::all_gather) <= 6, "test", "with backward:\n{}", traffic.str());
  }));
}
