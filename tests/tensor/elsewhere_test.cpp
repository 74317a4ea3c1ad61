// Tensors elsewhere: handles on ranks that are not in the mesh, dt::on, and programs on several meshes against one device.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/redistribute/between_meshes.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <fmt/ranges.h>

#include <atomic>
#include <sstream>

using namespace dtensor;
using namespace dtensor::test;

namespace {

struct TwoMeshes {
  DeviceMesh first{torch::kCPU, {0, 1}, {2}, {"a"}};
  DeviceMesh second{torch::kCPU, {2, 3}, {2}, {"a"}};
};

void on_every_transport_of_four(const std::function<void(World&)>& body) {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    INFO(transport);
    CHECK_NOTHROW(on_ranks(4, body, transport));
  }
}

void check_trained_parameters(const torch::nn::Module& module, const std::vector<at::Tensor>& expected, int rank) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto got = full_tensor(module.parameters()[i]).detach();
    require(torch::allclose(got, expected[i], 1e-12, 1e-12), "test", "parameter {} differs on rank {}", i, rank);
  }
}

}  // namespace

TEST_CASE("elsewhere: a handle tells what is known and refuses the rest", "[elsewhere]") {
  on_every_transport_of_four([](World& world) {
    const TwoMeshes meshes;
    const auto whole = counting({4, 6});
    const auto x = distribute_tensor(whole, meshes.first, {shard(0)});
    require(x.is_absent() == (world.rank() >= 2), "test", "who has it");
    require(x.sizes() == whole.sizes() && x->sizes() == whole.sizes() && x->scalar_type() == torch::kDouble, "test", "its metadata");
    require(x.placements()[0] == shard(0) && x.mesh() == meshes.first, "test", "its layout");
    if (!x.is_absent()) return same(x.tensor(), whole, "its values");
    std::ostringstream text;
    text << x << ' ' << x.tensor();
    require(text.str().find("f64[4, 6] (S(0)) on (a=2)") == 0 && text.str().find("whose values are on ranks [0, 1]") != std::string::npos,
            "test", "printed as {}", text.str());
    const std::string why = "the values are on ranks [0, 1]";
    refuses("the tensor is elsewhere: this rank knows its layout", [&] { x.tensor() + 1; });
    refuses("hint: bring it here with dt::redistribute", [&] { x->relu(); });
    refuses(why, [&] { x->sum().item<double>(); });
    refuses(why, [&] { x->t(); });
    refuses(why, [&] { x.full_tensor(); });
    refuses(why, [&] { x.to_local(); });
    refuses(why, [&] { x->data_ptr(); });
    refuses(why, [&] { x->clone().add_(1); });
    refuses("hint: give the global sizes", [&] { from_local(whole, meshes.first, {shard(0)}); });
    refuses("hint: dt::on(mesh, f)", [&] { Spmd spmd(meshes.first); });
    require(x.redistribute({shard(1)}).is_absent() && x->detach().sizes() == whole.sizes(), "test", "moved on its own mesh");
    CommDebugMode comm;
    require(zeros({3}, meshes.first, Placements{replicate()}).is_absent() && randn({3, 2}, meshes.first, Placements{shard(0)}).is_absent(),
            "test", "factories");
    expect(comm, 0, "metadata");
  });
}

TEST_CASE("elsewhere: what dt::on computes is there and absent elsewhere", "[elsewhere]") {
  on_every_transport_of_four([](World& world) {
    const TwoMeshes meshes;
    const auto whole = torch::arange(24, torch::kDouble).view({4, 6});  // whole numbers: sums are exact in any order
    const auto x = distribute_tensor(whole, meshes.first, {shard(0)});
    CommDebugMode comm;
    const at::Tensor y = on(meshes.first, [&] {
      return (x.tensor().matmul(torch::ones({6, 5}, torch::kDouble)) * 2).sum(0) + torch::arange(5, torch::kDouble);
    });
    const auto sums = (whole.matmul(torch::ones({6, 5}, torch::kDouble)) * 2).sum(0) + torch::arange(5, torch::kDouble);
    require(DTensor(y).is_absent() == (world.rank() >= 2) && y.sizes() == sums.sizes() && y.scalar_type() == torch::kDouble, "test",
            "the result");
    if (world.rank() >= 2) expect(comm, 0, "ranks elsewhere");
    require(Spmd::current() == nullptr, "test", "the region has ended");
    const auto there = redistribute(y, meshes.second, {shard(0)});
    if (world.rank() >= 2) same(there, sums, "the result at its new place");
    const auto back = redistribute(on(meshes.second, [&] { return there * 3; }), meshes.first, {replicate()});
    if (world.rank() < 2) same(back, sums * 3, "and back");

    refuses(world.rank() < 2 ? "the tensor is elsewhere" : "a tensor of another mesh is used inside of dt::on",
                      [&] { on(meshes.first, [&] { return there + 1; }); });
    if (world.rank() >= 2)
      refuses("ask for values outside of dt::on", [&] { on(meshes.first, [&] { return x->sum().item<double>(); }); });
    // What one device refuses is refused on every rank, and the program goes on.
    refuses("", [&] { on(meshes.first, [&] { return x->matmul(torch::ones({5, 5}, torch::kDouble)); }); });
    world.barrier();
  });
}

TEST_CASE("elsewhere: layouts are worked out as on the mesh's own ranks", "[elsewhere]") {
  std::mutex mutex;
  std::map<std::string, std::set<std::string>> seen;  // by step: what ranks say
  CHECK_NOTHROW(on_ranks(6, [&](World&) {
    const DeviceMesh mesh(torch::kCPU, {1, 3, 4, 5}, {2, 2}, {"dp", "tp"});
    const auto note = [&](const char* step, const at::Tensor& tensor) {
      auto layout = DTensor(tensor).layout().str();
      if (const auto at = layout.find(", absent"); at != std::string::npos) layout.erase(at);
      const std::lock_guard lock(mutex);
      seen[step].insert(fmt::format("{} strides {}", layout, tensor.strides().vec()));
    };
    on(mesh, [&] {
      torch::nn::Linear first(6, 8), second(8, 3);
      parallelize_module(*first, mesh, {{"weight", {{"tp", shard(0)}}}, {"bias", {{"tp", shard(0)}}}});
      parallelize_module(*second, mesh, {{"weight", {{"tp", shard(1)}}}});
      const auto x = distribute_tensor(torch::ones({5, 6}), mesh, {shard(0), replicate()});
      const auto hidden = torch::gelu(first(x));
      note("hidden", hidden);
      const auto out = second(hidden);
      note("out", out);
      const auto loss = torch::log_softmax(out, 1).mean();
      note("loss", loss);
      loss.backward();
      note("gradient", first->weight.grad());
      note("view", hidden.view({5, 2, 4}).transpose(1, 2));
      torch::optim::AdamW optimizer(second->parameters(), 1e-2);
      optimizer.step();
      note("weight", second->weight);
    });
  }));
  CHECK(seen.size() == 6);
  for (const auto& [step, layouts] : seen) {
    INFO(step << ": " << fmt::format("{}", fmt::join(layouts, "; ")));
    CHECK(layouts.size() == 1);
  }
}

TEST_CASE("elsewhere: random numbers of several meshes are one stream", "[elsewhere]") {
  torch::manual_seed(3);
  const auto first = torch::randn({300, 7}), mask = torch::dropout(torch::ones({64, 8}), 0.5, true), second = torch::rand({5});
  auto third = torch::empty({40, 3});
  third.uniform_(1, 2);
  const auto odds = torch::arange(90).view({30, 3}) / 100.0;
  const auto coins = torch::bernoulli(odds), scaled = at::normal(odds, odds + 1), again = torch::bernoulli(odds),
             shuffled = torch::randperm(9);
  on_every_transport_of_four([&](World& world) {
    const TwoMeshes meshes;
    torch::manual_seed(3);
    const at::Tensor a = on(meshes.first, [] { return torch::randn({300, 7}); });
    const at::Tensor b = on(meshes.second, [&] {
      return torch::dropout(distribute_tensor(torch::ones({64, 8}), meshes.second, {shard(0)}).tensor(), 0.5, true);
    });
    const at::Tensor c = on(meshes.first, [] { return torch::rand({5}); });
    const auto d = empty({40, 3}, meshes.second, Placements{shard(0)});
    on(meshes.second, [&] { d->uniform_(1, 2); });
    // Of probabilities and means that are cut, then of whole ones.
    const auto cut = distribute_tensor(odds, meshes.first, {shard(0)});
    const at::Tensor e = on(meshes.first, [&] { return torch::bernoulli(cut); }),
                     f = on(meshes.first, [&] { return at::normal(cut.tensor(), cut.tensor() + 1); });
    const auto whole = distribute_tensor(odds, meshes.first, {replicate()});
    const at::Tensor g = on(meshes.first, [&] { return torch::bernoulli(whole); }),
                     h = on(meshes.second, [] { return torch::randperm(9); });
    if (world.rank() < 2) same(e, coins, "coins"), same(f, scaled, "scaled numbers"), same(g, again, "coins of whole probabilities");
    if (world.rank() >= 2) same(h, shuffled, "a permutation");
    refuses(world.rank() < 2 ? "" : "hangs on values", [&] {
      on(meshes.first, [&] { return torch::poisson(whole); });
      fail("test", "its own ranks draw");
    });
    if (world.rank() < 2) same(a, first, "normal numbers"), same(c, second, "uniform numbers");
    if (world.rank() >= 2) same(b, mask, "a mask"), same(d.tensor(), third, "numbers in place");
  });
}

TEST_CASE("elsewhere: a model on two meshes trains as on one device", "[elsewhere]") {
  const bool sharded = GENERATE(false, true);
  INFO((sharded ? "fully sharded" : "whole parameters"));
  struct Losses {
    std::vector<double> values;
    std::vector<at::Tensor> parameters;
  };
  const auto data = counting({8, 6}), target = counting({8, 3}) / 2;
  const auto one_device = [&] {
    torch::manual_seed(0);
    torch::nn::Linear encoder(torch::nn::LinearOptions(6, 16)), decoder(torch::nn::LinearOptions(16, 3));
    encoder->to(torch::kDouble), decoder->to(torch::kDouble);
    torch::optim::SGD one(encoder->parameters(), 0.1), two(decoder->parameters(), 0.1);
    Losses losses;
    for (int step = 0; step < 4; ++step) {
      const auto loss = torch::mse_loss(decoder(torch::dropout(torch::gelu(encoder(data)), 0.25, true)), target);
      one.zero_grad(), two.zero_grad();
      loss.backward();
      one.step(), two.step();
      losses.values.push_back(loss.item<double>());
    }
    for (const auto& parameter : encoder->parameters()) losses.parameters.push_back(parameter.detach().clone());
    return losses;
  }();
  for (const auto& second_ranks : {std::vector<int>{2, 3}, std::vector<int>{1, 2, 3}, std::vector<int>{1, 0}}) {
    on_every_transport_of_four([&](World& world) {
      const DeviceMesh first(torch::kCPU, {0, 1}, {2}, {"dp"}),
          second(torch::kCPU, second_ranks, {static_cast<int64_t>(second_ranks.size())}, {"dp"});
      torch::manual_seed(0);
      auto encoder = on(first, [] { return torch::nn::Linear(6, 16); });
      auto decoder = on(second, [] { return torch::nn::Linear(16, 3); });
      on(first, [&] { encoder->to(torch::kDouble); });
      on(second, [&] { decoder->to(torch::kDouble); });
      if (sharded) {
        const auto units = fully_shard(*encoder, first).units();
        fully_shard(*decoder, second);
        require(units.size() == 1 && units[0].parameters == std::vector<std::string>{"weight", "bias"}, "test", "its unit");
        require(DTensor(encoder->weight).placements()[0].is_flat(), "test", "{}", DTensor(encoder->weight).layout().str());
      }
      torch::optim::SGD one(encoder->parameters(), 0.1), two(decoder->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        const auto x = distribute_tensor(data, first, {shard(0)});
        const at::Tensor hidden = on(first, [&] { return torch::dropout(torch::gelu(encoder(x)), 0.25, true); });
        const auto moved = redistribute(hidden, second, {shard(0)});
        const at::Tensor loss =
            on(second, [&] { return torch::mse_loss(decoder(moved), distribute_tensor(target, second, {shard(0)}).tensor()); });
        on(first, [&] { one.zero_grad(); });
        on(second, [&] { two.zero_grad(); });
        loss.backward();
        on(first, [&] { one.step(); });
        on(second, [&] { two.step(); });
        if (DTensor(loss).is_absent()) continue;
        const auto value = full_tensor(loss).item<double>();
        require(std::abs(value - one_device.values[step]) < 1e-12, "test", "step {}: loss {}; expected {}", step, value,
                one_device.values[step]);
      }
      if (first.contains_this_rank()) check_trained_parameters(*encoder, one_device.parameters, world.rank());
    });
  }
}

TEST_CASE("elsewhere: four stages by slices of a mesh", "[elsewhere]") {
  const auto data = torch::arange(16, torch::kDouble).view({4, 4}) - 7;
  auto expected = data;
  for (int stage = 0; stage < 4; ++stage) expected = (expected + stage).matmul(data);
  for (const std::string transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_ranks(
        8,
        [&](World& world) {
          const auto mesh = init_device_mesh(torch::kCPU, {4, 2}, {"pp", "tp"});
          at::Tensor x = distribute_tensor(data, mesh.slice("pp", 0), {shard(0)}).tensor();
          x.requires_grad_();
          auto y = x;
          for (int stage = 0; stage < 4; ++stage) {
            const auto here = mesh.slice("pp", stage);
            y = redistribute(y, here, {shard(stage % 2)});
            y = on(here, [&] { return (y + stage).matmul(distribute_tensor(data, here, {replicate()}).tensor()); });
          }
          if (world.rank() >= 6) same(y, expected, "the last stage's result");
          const at::Tensor loss = on(mesh.slice("pp", 3), [&] { return y.sum(); });
          loss.backward();
          auto gradient = torch::ones({4, 4}, torch::kDouble);
          for (int stage = 0; stage < 4; ++stage) gradient = gradient.matmul(data.t());
          if (world.rank() < 2)
            require(torch::allclose(full_tensor(x.grad()), gradient), "test", "the gradient of the first stage's input");
          require(x.grad().defined() && x.grad().sizes() == x.sizes(), "test", "every rank knows of it");
        },
        transport));
  }
}

TEST_CASE("elsewhere: ranks that are not concerned run ahead", "[elsewhere]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    std::atomic<int> finished = 0;
    CHECK_NOTHROW(on_ranks(
        4,
        [&](World& world) {
          const TwoMeshes meshes;
          // Groups are made where they are first used, by all their ranks.
          auto x = distribute_tensor(counting({4, 4}), meshes.first, {shard(0)});
          redistribute(x.tensor(), meshes.second, {shard(1)});
          world.barrier();
          if (world.rank() >= 2) {
            for (int i = 0; i < 1000 && finished < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
            require(finished == 2, "test", "the ranks of the first mesh wait for those of the second");
          }
          for (int step = 0; step < 3; ++step) {
            const auto y = redistribute(on(meshes.first, [&] { return x.tensor() * step; }), meshes.second, {shard(1)});
            const at::Tensor z = on(meshes.second, [&] { return y + 1; });
            if (world.rank() >= 2) same(z, counting({4, 4}) * step + 1, "the result");
          }
          if (world.rank() < 2) ++finished;
        },
        transport));
  }
}

TEST_CASE("elsewhere: local tensors move inside Spmd as outside", "[elsewhere]") {
  on_every_transport_of_four([](World& world) {
    const auto mesh = init_device_mesh(torch::kCPU, {4}, {"all"});
    const TwoMeshes meshes;
    const auto whole = counting({4, 8});
    const auto get = [&](const DeviceMesh& on, const Placement& placement) {
      return Layout::get(on, Placements{placement}, whole.sizes(), torch::kDouble);
    };
    const auto rows = get(mesh, shard(0)), columns = get(mesh, shard(1)), first = get(meshes.first, shard(0)),
               second = get(meshes.second, shard(1));
    const Spmd spmd(mesh);
    const auto row = local_shard(distribute_tensor(whole, mesh, {shard(0)}).tensor());
    const auto column = move_local(row, rows, columns).get();
    require(!is_dtensor(column), "test", "the result is plain");
    const auto own = world.rank() < 2 ? local_shard(distribute_tensor(whole, meshes.first, {shard(0)}).tensor()) : at::Tensor();
    const auto moved = move_local_between(own, first, second).get();
    const NoSpmd plain;
    require(column.equal(whole.narrow(1, 2 * world.rank(), 2)), "test", "on one mesh");
    if (world.rank() >= 2) require(moved.equal(whole.narrow(1, 4 * (world.rank() - 2), 4)), "test", "between two");
  });
}
