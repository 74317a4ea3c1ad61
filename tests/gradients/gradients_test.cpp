// Gradients through moves, parts and wholes, and where they accumulate.
#include "tests/support/dispatch_support.hpp"

#include <optional>

namespace dt = dtensor;
using namespace dt::test;

TEST_CASE("gradients of redistribute and to_local and full_tensor and from_local", "[gradients]") {
  for (const int ranks : {2, 3, 4}) {
    REQUIRE_NOTHROW(on_ranks(ranks, [](dt::World& world) {
      auto mesh = line(world);
      const auto x = counting({5, 4}), weight = counting({5, 4}) + 3;
      for (const auto& placement : {dt::shard(0), dt::shard(1), dt::replicate()}) {
        auto leaf = x.clone().requires_grad_();
        auto full = dt::distribute_tensor(leaf, mesh, {placement}).full_tensor();
        (full * weight).sum().backward();
        same(leaf.grad(), weight, "gradient through distribute_tensor and full_tensor");

        auto shard = dt::distribute_tensor(x, mesh, {placement}).tensor().detach().requires_grad_();
        auto moved = dt::DTensor(shard).redistribute({dt::shard(1)});
        torch::mul(moved, dt::distribute_tensor(weight, mesh, {dt::shard(1)})).sum().backward();
        same(shard.grad(), weight, "gradient through redistribute");
        dt::require(dt::DTensor(shard.grad()).placements()[0] == placement, "test", "the gradient of {} lies as {}",
                    placement.str(), dt::DTensor(shard.grad()).layout().str());
      }
      auto local = torch::full({2, 2}, 1.0 + world.rank(), torch::kDouble).requires_grad_();
      dt::from_local(local, mesh, {dt::partial()})->mul(2.0).sum().backward();
      same(local.grad(), torch::full({2, 2}, 2.0, torch::kDouble), "gradient of a Partial part");
    }));
  }
}

TEST_CASE("gradients of gradients pass through parts and wholes", "[gradients]") {
  const auto x = torch::tensor({0.5, -1.0, 2.0, 3.0}, torch::kDouble);
  // A gradient penalty: the square of the gradient of sum(y^3), beside another term.
  const auto penalty = [](const at::Tensor& leaf, const std::function<at::Tensor(const at::Tensor&)>& cube) {
    const auto gradient = torch::autograd::grad({cube(leaf).sum()}, {leaf}, {}, true, true)[0];
    ((gradient * gradient).sum() + (leaf * leaf).sum()).backward();
    return leaf.grad();
  };
  const auto cube = [](const at::Tensor& t) { return t * t * t; };
  const auto expected = penalty(x.clone().requires_grad_(), cube);
  for (const int ranks : {2, 3}) {
    REQUIRE_NOTHROW(on_ranks(ranks, [&](dt::World& world) {
      const auto mesh = line(world);
      for (const auto& placement : {dt::shard(0), dt::replicate()}) {
        const auto leaf = [&] { return dt::distribute_tensor(x, mesh, {placement}).tensor().detach().requires_grad_(); };
        const auto mapped = dt::local_map(cube, mesh, {{placement}}, {{placement}});
        same(penalty(leaf(), [&](const at::Tensor& t) { return mapped(t); }), expected, "through local_map");
        same(penalty(leaf(),
                     [&](const at::Tensor& t) { return dt::distribute_tensor(cube(dt::full_tensor(t)), mesh, {dt::shard(0)}).tensor(); }),
             expected, "through full_tensor and distribute_tensor");
        same(penalty(leaf(),
                     [&](const at::Tensor& t) { return cube(dt::from_local(dt::DTensor(t).to_local(), mesh, {placement}).tensor()); }),
             expected, "through to_local and from_local");
      }
    }));
  }
}

TEST_CASE("gradients accumulate in the parameter's layout; no_sync defers", "[gradients]") {
  const char* transport = GENERATE("threads", "gloo");
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    auto mesh = line(world);
    dt::Spmd spmd(mesh);
    torch::manual_seed(1);
    torch::nn::Linear linear(4, 4);
    const auto x = dt::distribute_tensor(torch::ones({6, 4}), mesh, {dt::shard(0)});
    {
      const auto deferred = dt::no_sync();
      dt::CommDebugMode comm;
      linear(x).sum().backward();
      linear(x).sum().backward();
      expect(comm, 0, "backward under no_sync");
      dt::require(dt::DTensor(linear->weight.grad()).layout().has_partial(), "test", "no_sync did not defer");
    }
    linear(x).sum().backward();
    for (const auto& parameter : linear->parameters()) {
      dt::require(dt::DTensor(parameter.grad()).layout().is_replicated(), "test", "the gradient is left {}",
                  dt::DTensor(parameter.grad()).layout().str());
    }
    same(linear->weight.grad(), torch::full({4, 4}, 18.0f), "three accumulated gradients");
    linear->zero_grad();
    {
      const auto deferred = dt::no_sync();
      linear(x).sum().backward();
    }
    dt::sync_gradients(linear->parameters());
    same(linear->bias.grad(), torch::full({4}, 6.0f), "sync_gradients");
    for (auto& parameter : linear->parameters()) parameter.mutable_grad() = torch::full_like(parameter, 2.0f).detach();
    {
      const auto deferred = dt::no_sync();
      dt::CommDebugMode comm;
      linear(x).sum().backward();
      expect(comm, 0, "backward under no_sync into gradients that are whole");
    }
    linear(x).sum().backward();
    same(linear->bias.grad(), torch::full({4}, 14.0f), "gradients that were whole before no_sync");
    torch::optim::Adam optimizer(linear->parameters(), 0.1);
    dt::parallelize_module(*linear, mesh, {{"weight", {{"tp", dt::shard(0)}}}});
    linear->weight.mutable_grad().reset();
    linear(x).sum().backward();
    optimizer.step();
    for (const auto& [key, state] : optimizer.state()) {
      const auto& average = static_cast<torch::optim::AdamParamState&>(*state).exp_avg();
      const bool is_weight = average.sizes() == linear->weight.sizes();
      dt::require(dt::DTensor(average).placements()[0].is_shard() == is_weight, "test", "optimizer state lies as {}",
                  dt::DTensor(average).layout().str());
    }
  }, transport));
}

// A hook brings parts of a sum, as a backward pass does where a sharded weight meets a batch that is cut over the same ranks.
TEST_CASE("no_sync defers the sums of sharded parameters", "[gradients]") {
  const char* transport = GENERATE("threads", "gloo");
  const auto check = [](const dt::DeviceMesh& mesh, const dt::Placements& placements, int64_t ranks) {
    const auto values = torch::arange(20, torch::kDouble).reshape({5, 4});
    const dt::Spmd spmd(mesh);
    const auto w = at::Tensor(dt::distribute_tensor(values, mesh, placements)).detach().requires_grad_();
    w.mutable_grad() = torch::full_like(w, 2).detach();
    w.register_hook([&](const at::Tensor&) {
      const dt::NoSpmd plain;
      return dt::from_local(values, mesh, dt::Placements(mesh.ndim(), dt::partial()), values.sizes()).tensor();
    });
    std::optional<dt::NoSync> deferred(std::in_place);
    dt::CommDebugMode comm;
    w.sum().backward();
    w.sum().backward();
    expect(comm, 0, "backward under no_sync into shards");
    dt::require(dt::DTensor(w.grad()).layout().has_partial(), "test", "no_sync did not defer");
    deferred.reset();
    w.sum().backward();
    dt::require(dt::DTensor(w.grad()).placements() == dt::PlacementsRef(placements), "test", "the gradient is left {}",
                dt::DTensor(w.grad()).layout().str());
    same(w.grad(), 3 * ranks * values + 2, "the sum of the hook's parts");
  };
  for (const int n : {2, 3}) {
    for (const int64_t dim : {0, 1}) {
      CAPTURE(transport, n, dim);
      REQUIRE_NOTHROW(on_ranks(
          n, [&](dt::World& world) { check(line(world), {dt::shard(dim)}, n); }, transport));
    }
  }
  for (const auto& placements : {dt::Placements{dt::replicate(), dt::shard(0)}, dt::Placements{dt::shard(0), dt::shard(0)}}) {
    REQUIRE_NOTHROW(on_ranks(
        4, [&](dt::World&) { check(dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"}), placements, 4); }, transport));
  }
}

TEST_CASE("gradients on a mesh of one are copied where somebody keeps them", "[gradients]") {
  on_ranks(1, [](dt::World&) {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {1}, {"dp"});
    const dt::Spmd spmd(mesh);
    const auto x = dt::redistribute(torch::ones({3, 4}), {dt::shard(0)});  // so that the gradient of w is pending
    const void* seen = nullptr;
    auto w = torch::ones({4}).requires_grad_();
    w.register_hook([&](const at::Tensor& gradient) { seen = dt::DTensor(gradient).to_local().data_ptr(); });
    (x * w).sum().backward();
    dt::require(dt::DTensor(w.grad()).to_local().data_ptr() == seen, "test", "the gradient was copied");

    at::Tensor kept;
    w.mutable_grad() = at::Tensor();
    w.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
    (x * w).sum().backward();
    const auto first = kept;
    (x * w).sum().backward();
    dt::require(dt::full_tensor(first).equal(torch::full({4}, 3.)), "test", "a gradient that was kept has changed");
    dt::require(dt::full_tensor(w.grad()).equal(torch::full({4}, 6.)), "test", "the sum of two gradients");
  });
}

// A sigmoid's backward pass reads its result. libtorch sees that a plain one was written to, and so it is seen here.
TEST_CASE("gradients: a result of local_map that was written to in place is noticed", "[gradients][errors]") {
  const char* transport = GENERATE("threads", "gloo");
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    const at::Tensor x = dt::distribute_tensor(torch::ones({4, 3}), mesh, {dt::shard(0)});
    x.requires_grad_();
    const auto squash = [](const at::Tensor& local) { return local.sigmoid(); };
    const auto y = dt::local_map(squash, mesh, {{dt::shard(0)}}, {{dt::shard(0)}})(x);
    y.mul_(2);
    try {
      y.sum().backward();
    } catch (const c10::Error& error) {
      return dt::require(says("modified by an inplace operation").match(error.what()), "test", "it says: {}", error.what());
    }
    dt::fail("test", "the gradient is that of other values");
  }, transport));
}
