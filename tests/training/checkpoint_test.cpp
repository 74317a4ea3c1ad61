// Activation checkpointing: the gradients are those without, the memory is not.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/words_of.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/training/checkpoint.hpp>

#include <ATen/autocast_mode.h>

#include <torch/library.h>

#include <atomic>
#include <optional>

namespace dt = dtensor;
using namespace dt::test;

namespace {

using Tensors = std::vector<at::Tensor>;

std::atomic<int> triples{0};  // kernels that ran

at::Tensor triple(const at::Tensor& x) {
  ++triples;
  return x * 3;
}

struct Triple : torch::autograd::Function<Triple> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("kit_test::triple", "").typed<at::Tensor(const at::Tensor&)>();
    auto y = op.call(x);
    context->save_for_backward({x, y});
    return y;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * 3 + 0 * (saved[1] - saved[0] * 3)};
  }
};

// Draws, and does not say so in a tag.
at::Tensor noisy(const at::Tensor& x) { return x + at::rand_like(x); }

struct Noisy : torch::autograd::Function<Noisy> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("kit_test::noisy", "").typed<at::Tensor(const at::Tensor&)>();
    return op.call(x);
  }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors gradients) { return gradients; }
};

TORCH_LIBRARY(kit_test, library) {
  library.def("triple(Tensor x) -> Tensor");
  library.def("noisy(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(kit_test, CPU, library) {
  library.impl("triple", triple);
  library.impl("noisy", noisy);
}
TORCH_LIBRARY_IMPL(kit_test, Autograd, library) {
  library.impl("triple", [](const at::Tensor& x) { return Triple::apply(x); });
  library.impl("noisy", [](const at::Tensor& x) { return Noisy::apply(x); });
}
at::Tensor call(const char* name, const at::Tensor& x) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<at::Tensor(const at::Tensor&)>().call(x);
}
at::Tensor call_triple(const at::Tensor& x) { return call("kit_test::triple", x); }

// Two layers with dropout, of which one writes in place; plain or distributed.
struct Block : torch::nn::Module {
  explicit Block(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 2 * width))), down(register_module("down", torch::nn::Linear(2 * width, width))) {
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    auto h = torch::dropout(torch::gelu(up(x)), 0.3, true) * 2;
    h.add_(0.5);
    return x + torch::dropout(down(torch::tanh(h)), 0.2, true);
  }
  torch::nn::Linear up, down;
  int calls = 0;
};

enum class Way { straight, each, nested, selective, all };

at::Tensor run(const std::vector<std::shared_ptr<Block>>& blocks, at::Tensor x, Way way) {
  dt::CheckpointOptions options;
  if (way == Way::selective) options.save = dt::matrix_products();
  if (way == Way::all) {
    options.save = {"aten::addmm", "aten::mm", "aten::gelu", "aten::tanh", "aten::native_dropout", "aten::bernoulli", "aten::dropout"};
  }
  const auto one = [](const std::shared_ptr<Block>& block, const at::Tensor& in) { return block->forward(in); };
  if (way == Way::straight) {
    for (const auto& block : blocks) x = one(block, x);
    return x;
  }
  if (way == Way::nested) {
    return dt::checkpoint(
        [&blocks, one](const at::Tensor& in) {
          auto y = in;
          for (const auto& block : blocks) y = dt::checkpoint(one, block, y);
          return y * 1.5;
        },
        x) / 1.5;
  }
  for (const auto& block : blocks) x = dt::checkpoint(options, one, block, x);
  return x;
}

// Output, gradients of the input and the parameters, and what the stream gives next.
Tensors train(const std::optional<dt::DeviceMesh>& mesh, const dt::Placements& activations, const dt::Plan& plan, Way way,
              int* calls = nullptr) {
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);
  torch::manual_seed(5);
  std::vector<std::shared_ptr<Block>> blocks = {std::make_shared<Block>(6), std::make_shared<Block>(6)};
  auto x = counting({7, 6});
  if (mesh) {
    for (const auto& block : blocks) dt::parallelize_module(*block, *mesh, plan);
    x = dt::distribute_tensor(x, *mesh, activations).tensor().detach();
  }
  x.requires_grad_();
  const auto y = run(blocks, x, way);
  auto result = Tensors{y.detach()};
  result.push_back(torch::rand({5}, torch::kDouble));
  (y * y).sum().backward();
  result.push_back(torch::rand({5}, torch::kDouble));
  result.push_back(x.grad());
  for (const auto& block : blocks) {
    for (const auto& p : block->parameters()) result.push_back(p.grad());
    if (calls) *calls += block->calls;
  }
  for (auto& tensor : result) tensor = dt::full_tensor(tensor).clone();
  return result;
}

void all_same(const Tensors& got, const Tensors& expected, double tolerance) {
  dt::require(got.size() == expected.size(), "test", "{} tensors, expected {}", got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const bool close = tolerance == 0 ? got[i].equal(expected[i]) : torch::allclose(got[i], expected[i], tolerance, tolerance);
    dt::require(close, "test", "tensor {} of {} differs by {}", i, got.size(), (got[i] - expected[i]).abs().max().item<double>());
  }
}

// Whether the memory of a tensor that the checkpointed function saved for backward is gone after the forward.
template <class Run>
bool is_freed(Run&& run) {
  c10::weak_intrusive_ptr<c10::StorageImpl> watched(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto x = counting({4, 4}).requires_grad_();
  const auto y = run(
      [&watched](const at::Tensor& in) {
        const auto middle = in * 2;
        watched = c10::weak_intrusive_ptr<c10::StorageImpl>(
            c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(middle.storage().unsafeGetStorageImpl()));
        return middle.exp() * middle;
      },
      x);
  const bool freed = watched.expired();
  y.sum().backward();
  const auto expected = 2 * (2 * x).exp() * (1 + 2 * x);
  dt::require(torch::allclose(x.grad(), expected.detach(), 1e-12, 1e-12), "test", "the gradient differs");
  return freed;
}

}  // namespace

TEST_CASE("checkpoint: gradients and random streams are those without", "[checkpoint]") {
  int calls = 0, again = 0, nested = 0;
  const auto expected = train(std::nullopt, {}, {}, Way::straight, &calls);
  all_same(train(std::nullopt, {}, {}, Way::each, &again), expected, 0);
  all_same(train(std::nullopt, {}, {}, Way::nested, &nested), expected, 1e-12);
  REQUIRE(calls == 2);
  REQUIRE(again == 4);
  REQUIRE(nested == 5);  // the outer one ends where the second block would begin
  all_same(train(std::nullopt, {}, {}, Way::selective), expected, 0);
  all_same(train(std::nullopt, {}, {}, Way::all), expected, 0);
}

TEST_CASE("checkpoint: the same on meshes", "[checkpoint]") {
  const auto expected = train(std::nullopt, {}, {}, Way::straight);
  const dt::Plan parallel = {{"up.*", {{"tp", dt::shard(0)}}}, {"down.weight", {{"tp", dt::shard(1)}}}};
  const dt::Plan rows = {{"*.weight", {{"tp", dt::shard(0)}}}};
  for (const auto way : {Way::each, Way::nested, Way::selective, Way::all}) {
    for (const int n : {1, 2, 3, 4}) {
      REQUIRE_NOTHROW(on_ranks(n, [&](dt::World& world) {
        const auto mesh = line(world);
        all_same(train(mesh, {dt::shard(0)}, {}, way), expected, 1e-12);
        all_same(train(mesh, {dt::replicate()}, parallel, way), expected, 1e-12);
        all_same(train(mesh, {dt::shard(1)}, rows, way), expected, 1e-12);
        all_same(train(mesh, {dt::shard(0)}, parallel, way), train(mesh, {dt::shard(0)}, parallel, Way::straight),
                 way == Way::nested ? 1e-12 : 0);
      }));
    }
    REQUIRE_NOTHROW(on_ranks(4, [&](dt::World&) {
      const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
      all_same(train(mesh, {dt::shard(0), dt::replicate()}, parallel, way), expected, 1e-12);
    }));
    REQUIRE_NOTHROW(on_ranks(
        2, [&](dt::World& world) { all_same(train(line(world), {dt::shard(0)}, parallel, way), expected, 1e-12); }, "gloo"));
  }
}

TEST_CASE("checkpoint: with a counter-based generator and a stream of the rank's own", "[checkpoint]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    const auto noisy = [&mesh](const at::Tensor& x) {
      const auto noise = [&] {
        const auto own = dt::rank_local_random();
        return torch::rand({4, 3}, torch::kDouble);
      }();
      return (torch::dropout(x, 0.5, true) * dt::from_local(noise, mesh, {dt::shard(0)}, {8, 3}).tensor()).exp();
    };
    const auto run = [&](bool checkpointed) {
      torch::manual_seed(3);
      dt::Spmd spmd(mesh);
      const auto x = dt::distribute_tensor(counting({8, 3}), mesh, {dt::shard(0)}).tensor().detach().requires_grad_();
      const auto y = checkpointed ? dt::checkpoint(noisy, x) : noisy(x);
      y.sum().backward();
      const auto own = dt::rank_local_random();
      return Tensors{dt::full_tensor(y.detach()), dt::full_tensor(x.grad()), torch::rand({3}, torch::kDouble)};
    };
    all_same(run(true), run(false), 0);
    world.generator() = dt::Generator(7);
    all_same(run(true), run(false), 0);
  }));
}

TEST_CASE("checkpoint: what is saved for backward is freed", "[checkpoint]") {
  const auto straight = [](const auto& fn, const at::Tensor& x) { return fn(x); };
  const auto once = [](const auto& fn, const at::Tensor& x) { return dt::checkpoint(fn, x); };
  const auto twice = [](const auto& fn, const at::Tensor& x) {
    return dt::checkpoint([fn](const at::Tensor& in) { return dt::checkpoint(fn, in); }, x);
  };
  const auto inner = [](const auto& fn, const at::Tensor& x) {
    return dt::checkpoint(
        [fn](const at::Tensor& in) {
          return dt::checkpoint([](const at::Tensor& y) { return y + 0; }, fn(in));
        },
        x);
  };
  const auto kept = [](const auto& fn, const at::Tensor& x) { return dt::checkpoint(dt::CheckpointOptions{{"aten::mul"}}, fn, x); };
  REQUIRE_FALSE(is_freed(straight));
  REQUIRE(is_freed(once));
  REQUIRE(is_freed(twice));
  REQUIRE(is_freed(inner));
  REQUIRE_FALSE(is_freed(kept));
}

TEST_CASE("checkpoint: casts of weights are not remembered beyond a backward", "[checkpoint]") {
  const auto weight = torch::ones({4, 4}).requires_grad_(), x = torch::ones({4, 4});
  const auto forward = [&] {
#if DTENSOR_TORCH_AT_LEAST(2, 4)
    at::autocast::set_autocast_enabled(at::kCPU, true);
#else
    at::autocast::set_cpu_enabled(true);
#endif
    const auto y = dt::checkpoint([&](const at::Tensor& t) { return t.mm(weight); }, x);
    at::autocast::clear_cache();
#if DTENSOR_TORCH_AT_LEAST(2, 4)
    at::autocast::set_autocast_enabled(at::kCPU, false);
#else
    at::autocast::set_cpu_enabled(false);
#endif
    return y;
  };
  const auto y = forward();
  REQUIRE(y.scalar_type() == torch::kBFloat16);
  y.sum().backward();
  {
    torch::NoGradGuard no_grad;
    weight.mul_(10);
  }
  REQUIRE(forward().eq(40).all().item<bool>());
}

TEST_CASE("checkpoint: a kept operator that draws without saying so", "[checkpoint][random]") {
  torch::manual_seed(5);
  const auto x = torch::ones({200}).requires_grad_();
  const auto y = dt::checkpoint(
      {.save = {"kit_test::noisy"}}, [](const at::Tensor& t) { return torch::dropout(call("kit_test::noisy", t), 0.5, true); }, x);
  y.sum().backward();
  REQUIRE(x.grad().ne(0).equal(y.ne(0)));
}

TEST_CASE("checkpoint: random numbers of the rank and backward after their region", "[checkpoint][random]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World&) {
    torch::manual_seed(3);
    const auto x = torch::ones({200}).requires_grad_();
    const auto drop = [](const at::Tensor& t) { return torch::dropout(t, 0.5, true); };
    at::Tensor y;
    {
      const auto own = dt::rank_local_random();
      y = dt::checkpoint(drop, x);
    }
    y.sum().backward();
    dt::require(x.grad().ne(0).equal(y.ne(0)), "test", "another mask");
    y = dt::checkpoint(drop, x);
    const auto own = dt::rank_local_random();
    const auto message = words_of<dt::Error>([&] { y.sum().backward(); });
    dt::require(message.find("ran outside of dt::rank_local_random()") != std::string::npos, "test", "got '{}'", message);
  }));
}

TEST_CASE("checkpoint: several inputs and results and inputs of other types", "[checkpoint]") {
  const auto function = [](const at::Tensor& a, const Tensors& list, double factor, const std::string& name) {
    auto product = a * list[0] * factor;
    return std::make_tuple(product.exp(), Tensors{product + list[1], list[1].sin()}, name + "!");
  };
  const auto a = counting({3, 2}).requires_grad_(), b = counting({3, 2}).add(1).requires_grad_(), c = counting({2}).requires_grad_();
  const auto total = [](const auto& results) {
    return std::get<0>(results).sum() + std::get<1>(results)[0].sum() + 2 * std::get<1>(results)[1].sum();
  };
  const auto expected = torch::autograd::grad({total(function(a, {b, c}, 0.5, "x"))}, {a, b, c});
  const auto results = dt::checkpoint(function, a, Tensors{b, c}, 0.5, std::string("x"));
  REQUIRE(std::get<2>(results) == "x!");
  all_same(torch::autograd::grad({total(results)}, {a, b, c}), expected, 0);
  // A part of the graph, more than once, and inputs that need no gradient.
  const auto again = dt::checkpoint(function, a, Tensors{b.detach(), c}, 0.5, std::string("y"));
  for (int i = 0; i < 2; ++i)
    all_same(torch::autograd::grad({std::get<0>(again).sum()}, {a}, {}, true), {(a * b * 0.5).exp() * b * 0.5}, 1e-14);
}

TEST_CASE("checkpoint: gradients of gradients", "[checkpoint]") {
  const auto x = counting({4}).requires_grad_();
  const auto cube = [](const at::Tensor& t) { return t * t * t; };
  const auto penalty = [&](const at::Tensor& y) {
    const auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({(gradient * gradient).sum()}, {x})[0];
  };
  all_same({penalty(dt::checkpoint(cube, x))}, {penalty(cube(x))}, 0);
}

TEST_CASE("checkpoint: kept results are not computed again", "[checkpoint]") {
  const auto function = [](const at::Tensor& x) { return call_triple(torch::tanh(x)).exp() * call_triple(x); };
  const auto x = counting({5}).requires_grad_();
  const auto expected = torch::autograd::grad({function(x).sum()}, {x});
  const auto kernels = [&](const dt::CheckpointOptions& options) {
    triples = 0;
    all_same(torch::autograd::grad({dt::checkpoint(options, function, x).sum()}, {x}), expected, 0);
    return triples.load();
  };
  REQUIRE(kernels({}) == 4);
  REQUIRE(kernels({{"kit_test::triple"}}) == 2);
  REQUIRE(kernels({{"kit_test::triple", "aten::tanh", "aten::mul.Tensor", "aten::exp"}}) == 2);
}

TEST_CASE("checkpoint: the recomputation ends with the last tensor that is saved", "[checkpoint]") {
  int reached = 0;
  const auto function = [&](const at::Tensor& x) {
    const auto y = x.exp() * x;
    ++reached;
    return y + 1;
  };
  const auto x = counting({5}).requires_grad_();
  dt::checkpoint(function, x).sum().backward();
  REQUIRE(reached == 1);
}

TEST_CASE("checkpoint: costs the communication of one more forward", "[checkpoint]") {
  const dt::Plan parallel = {{"up.*", {{"tp", dt::shard(0)}}}, {"down.weight", {{"tp", dt::shard(1)}}}};
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto count = [&](Way way) {
      dt::CommDebugMode comm;
      train(line(world), {dt::replicate()}, parallel, way);
      return comm.count();
    };
    count(Way::straight);
    const auto straight = count(Way::straight);
    // Each block's forward reduces once, at its end, which is not reached a second time.
    dt::require(count(Way::each) <= straight + 2, "test", "{} collectives; {} without checkpoints", count(Way::each), straight);
  }));
}
