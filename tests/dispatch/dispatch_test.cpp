// Operators on DTensors against one device: dispatch, Spmd, counted communication.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/op_check.hpp"

#include <sstream>
#include <thread>

namespace dt = dtensor;
using namespace dt::test;
using dt::comm::Collective;

TEST_CASE("dispatch: pointwise and mm on shards", "[dispatch]") {
  const char* transport = GENERATE("threads", "gloo");
  for (const int ranks : {1, 2, 3, 4}) {
    REQUIRE_NOTHROW(on_ranks(ranks, [](dt::World& world) {
      auto mesh = line(world);
      const auto a = counting({5, 6}), b = a + 1, w = counting({6, 3});
      auto A = dt::distribute_tensor(a, mesh, {dt::shard(0)}), B = dt::distribute_tensor(b, mesh, {dt::shard(0)});
      auto W = dt::distribute_tensor(w, mesh, {dt::replicate()});
      {
        dt::CommDebugMode comm;
        auto sum = torch::add(A, B), product = torch::mm(A, W);
        expect(comm, 0, "add and mm on rows");
        same(sum, a + b, "add");
        same(product, torch::mm(a, w), "mm");
      }
      auto k = torch::mm(dt::distribute_tensor(a, mesh, {dt::shard(1)}), dt::distribute_tensor(w, mesh, {dt::shard(0)}));
      dt::require(dt::DTensor(k).placements()[0].is_partial(), "test", "mm over k is {}", dt::DTensor(k).layout().str());
      dt::require(dt::full_tensor(k).allclose(torch::mm(a, w)), "test", "mm over k differs");
    }, transport));
  }
}

TEST_CASE("dispatch: later calls give the dtype of the first", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    auto mesh = line(world);
    const auto x = counting({4, 4});
    auto X = dt::distribute_tensor(x, mesh, {dt::shard(0)}), mask = dt::distribute_tensor(x > 0, mesh, {dt::shard(0)});
    for (int i = 0; i < 3; ++i) {
      const auto got = torch::where(mask, X, torch::mul(X, 2));
      same(got, torch::where(x > 0, x, x * 2), "where");
      dt::require(dt::DTensor(got).layout().dtype() == torch::kDouble, "test", "the layout is {}", dt::DTensor(got).layout().str());
    }
  }));
}

TEST_CASE("dispatch: a number is not a truth value and the default dtype is read", "[dispatch]") {
  const auto before = torch::get_default_dtype();
  REQUIRE_NOTHROW(on_ranks(1, [](dt::World& world) {
    const auto mask = torch::arange(8).gt(3), whole = torch::arange(8);
    const auto mesh = line(world);
    const auto M = dt::distribute_tensor(mask, mesh, {dt::shard(0)}).tensor(),
               W = dt::distribute_tensor(whole, mesh, {dt::shard(0)}).tensor();
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kFloat}) {
      torch::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
      for (int i = 0; i < 2; ++i) {
        same(M.mul(1), mask.mul(1), "mul by a number");
        same(M.mul(true), mask.mul(true), "mul by true");
        same(W / 2, whole / 2, "division of whole numbers");
        same(W.sqrt(), whole.sqrt(), "roots of whole numbers");
        dt::require(dt::DTensor(W / 2).layout().dtype() == dtype && dt::DTensor(M.mul(true)).layout().dtype() == torch::kBool, "test",
                    "layouts of other dtypes");
      }
    }
  }));
  torch::set_default_dtype(before);
}

TEST_CASE("dispatch: plain and distributed tensors do not take each other's data", "[dispatch][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    std::shared_ptr<torch::nn::Module> made, cloned;
    {
      const dt::Spmd spmd(mesh);
      made = torch::nn::Linear(4, 4).ptr();
      cloned = made->clone();
    }
    same(cloned->parameters()[0], dt::full_tensor(made->parameters()[0]), "the clone");
    auto plain = torch::ones({4});
    const auto distributed = dt::distribute_tensor(plain, mesh, {dt::shard(0)}).tensor();
    const auto refused = [](const auto& call) {
      try {
        call();
      } catch (const dt::Error& error) {
        return std::string(error.what()).find("cannot take the data of") != std::string::npos;
      }
      return false;
    };
    dt::require(refused([&] { made->clone(); }), "test", "a module was cloned outside of its region");
    dt::require(refused([&] { plain.set_data(distributed); }), "test", "a plain tensor took a distributed one's data");
    dt::require(refused([&] { at::Tensor(distributed).set_data(plain); }), "test", "a distributed tensor took a plain one's data");
    dt::require(plain.sum().item<double>() == 4, "test", "half taken");
  }));
}

TEST_CASE("dispatch: a pending operand may occur twice in a call", "[dispatch]") {
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
      auto mesh = line(world);
      const auto x = torch::arange(9, torch::kDouble).reshape({3, 3}), part = x + world.rank();
      const auto whole = 2 * x + 1;
      auto pending = [&] { return dt::from_local(part.clone(), mesh, {dt::partial()}, {3, 3}).tensor(); };
      for (int round = 0; round < 3; ++round) {
        auto a = pending(), b = pending(), c = pending();
        same(torch::mul(a, a), whole * whole, "mul");
        same(torch::maximum(b, b), whole, "maximum");
        same(torch::cat({c, c.t(), c}), torch::cat({whole, whole.t(), whole}), "cat");
      }
    }, transport));
  }
}

TEST_CASE("dispatch: a pending reduction is done once", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    auto mesh = line(world);
    auto part = dt::from_local(torch::full({4, 4}, 1.0 + world.rank()), mesh, {dt::partial()})->mul(1.0);
    dt::CommDebugMode comm;
    auto once = torch::relu(part), twice = torch::tanh(part);
    expect(comm, 1, "two readers of a Partial tensor");
    same(once, torch::full({4, 4}, 3.0), "relu");
    same(twice, torch::tanh(torch::full({4, 4}, 3.0)), "tanh");
  }));
}

TEST_CASE("dispatch: a column then row parallel MLP takes one all_reduce", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    auto mesh = line(world);
    const auto x = counting({8, 10}), up = counting({16, 10}), down = counting({10, 16});
    auto X = dt::distribute_tensor(x, mesh, {dt::replicate()});
    auto Up = dt::distribute_tensor(up, mesh, {dt::shard(0)}), Down = dt::distribute_tensor(down, mesh, {dt::shard(1)});
    dt::CommDebugMode comm;
    auto y = torch::mm(torch::relu(torch::mm(X, Up->t())), Down->t());
    expect(comm, 0, "the local shard");
    auto whole = dt::DTensor(y).redistribute({dt::replicate()});
    expect(comm, 1, "the reduction");
    dt::require(comm.count(Collective::all_reduce) == 1, "test", "not an all_reduce:\n{}", comm.str());
    dt::require(dt::full_tensor(whole).allclose(torch::mm(torch::relu(torch::mm(x, up.t())), down.t())), "test", "MLP differs");
  }));
}

TEST_CASE("views share memory with their base in place and under autograd", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    auto mesh = line(world);
    auto base = dt::distribute_tensor(counting({4, 6}), mesh, {dt::shard(0)}).tensor();
    auto expected = counting({4, 6});
    base.view({4, 2, 3}).select(1, 1).mul_(2), expected.view({4, 2, 3}).select(1, 1).mul_(2);
    same(base, expected, "in-place on a view");
    auto leaf = dt::distribute_tensor(counting({4, 6}), mesh, {dt::shard(0)}).tensor().detach().requires_grad_();
    auto plain = counting({4, 6}).requires_grad_();
    auto train = [](const torch::Tensor& t) {
      auto y = t * 3;
      y.slice(1, 0, 2).mul_(5);
      (y * y).sum().backward();
    };
    train(leaf), train(plain);
    same(leaf.grad(), plain.grad(), "gradient through an in-place operator on a view");
  }));
}

TEST_CASE("a redistributed tensor shares no memory with its source", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    auto mesh = line(world);
    const auto x = counting({4, 4});
    auto plain = x.clone();
    for (const auto& placement : {dt::shard(0), dt::shard(1), dt::replicate()}) {
      auto whole = dt::distribute_tensor(plain, mesh, {dt::replicate()});
      whole.redistribute({placement})->mul_(placement == dt::replicate() ? 1 : 2);
      dt::distribute_tensor(plain, mesh, {placement})->mul_(2);
      same(whole, x, "the source of a move");
    }
    same(plain, x, "the plain tensor");
  }));
}

TEST_CASE("Spmd: factories are replicated and plain tensors count so and seeds agree", "[spmd]") {
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World& world) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    torch::manual_seed(7);
    const auto plain = torch::ones({4, 3});
    {
      dt::Spmd spmd(mesh);
      const auto drawn = torch::randn({4, 3});
      dt::require(dt::is_dtensor(drawn) && dt::DTensor(drawn).layout().is_replicated(), "test", "randn is not replicated");
      const auto bits = dt::DTensor(drawn).to_local();
      const auto all = world.size() == 1 ? bits : mesh.communicator({0, 1}).all_gather(bits, {12, 12, 12, 12}).get();
      for (int r = 0; r < 4; ++r) dt::require(all.slice(0, 12 * r, 12 * r + 12).equal(bits.reshape(-1)), "test", "ranks drew differently");
      same(drawn + plain, bits + plain, "a plain tensor beside a distributed one");
      dt::require(!dt::is_dtensor(plain * 2), "test", "plain operands alone stay plain");
    }
    dt::require(!dt::is_dtensor(torch::zeros({2})), "test", "factories are plain again after the region");
  }));
}

TEST_CASE("reading: item and printing and comparison", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    auto mesh = line(world);
    const auto x = counting({3, 2});
    auto X = dt::distribute_tensor(x, mesh, {dt::shard(0)});
    dt::require(X->sum().item<double>() == x.sum().item<double>(), "test", "item differs");
    dt::require(X->equal(dt::distribute_tensor(x, mesh, {dt::shard(1)})), "test", "equal is false");
    dt::require(X->allclose(X), "test", "allclose is false");
    std::ostringstream got, expected;
    got << X;
    expected << "\n" << x;
    dt::require(got.str().find(expected.str()) != std::string::npos && got.str().find("S(0)") != std::string::npos, "test",
                "printed as {}", got.str());
  }));
}

TEST_CASE("dispatch: shapes that change every step do not pile up", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(1, [](dt::World& world) {
    auto mesh = line(world);
    for (int64_t n = 1; n <= 20000; ++n) {
      auto x = dt::from_local(torch::ones({n % 9973 + 1}), mesh, {dt::shard(0)}, {n % 9973 + 1});
      dt::require(torch::add(x, x).sizes()[0] == n % 9973 + 1, "test", "wrong size");
    }
  }));
}

TEST_CASE("dispatch: a write waits for a move that still reads", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World& world) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {4});
    for (int i = 0; i < 20; ++i) {
      auto x = dt::distribute_tensor(torch::arange(1, 1001, torch::kDouble), mesh, {i % 2 ? dt::shard(0) : dt::replicate()});
      auto p = dt::from_local(torch::full({100}, i + 1.0), mesh, {dt::partial()});
      const auto moved = x.redistribute({i % 2 ? dt::replicate() : dt::shard(0)});
      const auto sum = p.redistribute({dt::replicate()});
      if ((world.rank() + i) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // so that others wait for it
      x->neg_();
      p->select(0, 3).zero_();  // through a view
      dt::require(dt::full_tensor(moved).equal(torch::arange(1, 1001, torch::kDouble)), "test", "the move saw the write");
      dt::require(dt::full_tensor(sum).equal(torch::full({100}, 4 * (i + 1.0))), "test", "the sum saw the write");
    }
  }));
}

TEST_CASE("dispatch: ranks agree whether a reduction settles while a move is under way", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(3, [](dt::World& world) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {3});
    for (int i = 0; i < 30; ++i) {
      auto p = dt::from_local(torch::full({4}, i + 1.0), mesh, {dt::partial()});
      p = dt::DTensor(p->mul(1));  // memory of its own
      const auto sum = p.redistribute({dt::replicate()});
      if ((world.rank() + i) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if ((world.rank() + i) % 2 == 0) dt::full_tensor(sum.tensor().clone());  // some see it done, and some do not
      if ((world.rank() + i) % 2 == 1) dt::full_tensor(sum.tensor().clone());
      const auto bounded = torch::clamp(p, -5, 5);
      dt::require(dt::full_tensor(p).equal(torch::full({4}, 3 * (i + 1.0))), "test", "the value changed");
    }
  }));
}
