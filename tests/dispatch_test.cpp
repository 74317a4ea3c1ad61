// Operators on DTensors against one device: dispatch, Spmd, counted communication.
#include "dispatch_support.hpp"
#include "op_check.hpp"

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
    const auto M = dt::distribute_tensor(mask, mesh, {dt::shard(0)}).tensor(), W = dt::distribute_tensor(whole, mesh, {dt::shard(0)}).tensor();
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
    expect(comm, 0, "the local part");
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

TEST_CASE("dispatch: a view of a base that was written keeps its gradient", "[dispatch]") {
  const auto gradient = [](const at::Tensor& base, const at::Tensor& weight) {
    const auto view = base.view({4});
    base.mul_(weight);
    const auto copy = view.detach();  // asks for nothing of autograd's
    (view * view).sum().backward();
    return weight.grad();
  };
  const auto expected =
      gradient(torch::arange(4, torch::kDouble).view({2, 2}).clone(), torch::ones({2, 2}, torch::kDouble).requires_grad_());
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World&) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {2});
    for (const auto& placement : {dt::replicate(), dt::shard(0), dt::shard(1)}) {
      const auto placed = [&](const at::Tensor& x) { return dt::distribute_tensor(x, mesh, {placement}).tensor(); };
      const auto got =
          gradient(placed(torch::arange(4, torch::kDouble).view({2, 2})), placed(torch::ones({2, 2}, torch::kDouble)).requires_grad_());
      dt::require(dt::full_tensor(got).equal(expected), "test", "the gradient differs");
    }
  }));
}

TEST_CASE("dispatch: results lie in memory as one device would have them", "[dispatch]") {
  const auto results = [](const at::Tensor& x, const at::Tensor& y) {
    const auto t = x.t();
    return std::vector<at::Tensor>{
        at::where(t > 1, t, y), t.nan_to_num(),         at::rsub(y, t), t.flip({0}), torch::huber_loss(t, y, at::Reduction::None),
        t.logical_and(y > 0),   at::rot90(t, 1, {0, 1})};
  };
  const auto x = torch::arange(12, torch::kDouble).view({3, 4}), y = torch::ones({4, 3}, torch::kDouble);
  const auto expected = results(x, y);
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World&) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {2});
    for (const auto& placement : {dt::replicate(), dt::shard(0), dt::shard(1)}) {
      const auto got = results(dt::distribute_tensor(x, mesh, {placement}), dt::distribute_tensor(y, mesh, {dt::replicate()}));
      for (size_t i = 0; i < got.size(); ++i) {
        dt::require(got[i].strides() == expected[i].strides() && dt::full_tensor(got[i]).equal(expected[i]), "test", "result {} differs",
                    i);
      }
    }
  }));
}

TEST_CASE("dispatch: a settled reduction forgets no view that had to be copied", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World&) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2});
    auto x = dt::from_local(torch::ones({1, 4}), mesh, {dt::shard(1), dt::partial()}, {1, 8});
    const auto view = x->slice(1, 5, 7);  // of the second rank's part
    const auto settled = torch::tanh(x);
    view.mul_(2);
    dt::require(dt::full_tensor(x).sum().item<double>() == 2 * (8 + 2), "test", "the write did not reach the base");
  }));
}

TEST_CASE("dispatch: a pending norm may be written any numbers", "[dispatch]") {
  const auto x = counting({5, 4}) + 1;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto norm = [&] { return dt::distribute_tensor(x, line(world), {dt::shard(0)})->norm(2, 0); };
    const auto close = [](const at::Tensor& got, const at::Tensor& expected) {  // sums of squares add up in another order
      dt::require(dt::full_tensor(got).allclose(expected, 1e-12), "test", "differs");
    };
    close(norm().neg_(), -x.norm(2, 0));
    close(norm().sub_(100).add_(1), x.norm(2, 0) - 100 + 1);
    close(norm().fill_(-3), torch::full({4}, -3, torch::kDouble));
  }));
}

TEST_CASE("dispatch: out= forms refuse and convert dtypes as on one device", "[dispatch]") {
  const auto x = counting({4, 4});
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto mesh = line(world);
    const auto rows = dt::distribute_tensor(x, mesh, {dt::shard(0)}).tensor();
    auto wrong = dt::zeros({4, 4}, mesh, {dt::replicate()}, torch::kFloat).tensor();
    std::string words;
    try {
      torch::mm_out(wrong, rows, rows);
    } catch (const c10::Error& error) {
      words = error.what_without_backtrace();
    }
    dt::require(words.find("Expected out tensor to have dtype double, but got float instead") != std::string::npos, "test", "says {}",
                words);
    auto whole = dt::zeros({4}, mesh, {dt::replicate()}, torch::kLong).tensor();
    auto expected = torch::zeros({4}, torch::kLong);
    torch::sum_out(whole, rows, 1);
    torch::sum_out(expected, x, 1);
    dt::require(dt::full_tensor(whole).equal(expected), "test", "sum_out differs");
  }));
}

TEST_CASE("dispatch: what is written in place is brought back", "[dispatch]") {
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
      auto mesh = line(world);
      const auto x = torch::arange(12, torch::kDouble).reshape({3, 4}), y = x + 1;
      const auto part = [&](const at::Tensor& t) {
        return dt::from_local(world.rank() == 0 ? t - 3 : torch::full_like(t, 3), mesh, {dt::partial()}).tensor();
      };
      auto whole = dt::distribute_tensor(x, mesh, {dt::replicate()}).tensor();
      const auto view = whole.select(0, 1);
      whole.mul_(part(y));  // a sum of products, reduced into the whole
      same(whole, x * y, "mul_");
      same(view, (x * y).select(0, 1), "a view of what was written");
      auto rows = dt::distribute_tensor(x, mesh, {dt::shard(0)}).tensor();
      rows.cumsum_(0);
      same(rows, x.cumsum(0), "cumsum_");
      dt::require(dt::DTensor(rows).placements()[0] == dt::shard(0), "test", "it lies otherwise");
      auto pending = part(x);
      pending.tanh_();
      same(pending, x.tanh(), "tanh_");
      dt::require(dt::DTensor(pending).placements()[0] == dt::partial(), "test", "it lies otherwise");

      const auto explicitly = dt::explicit_communication();
      const std::string words = "communication must be explicit";
      for (const auto& call :
           std::vector<std::function<void()>>{[&] { whole.mul_(part(y)); }, [&] { rows.cumsum_(0); }, [&] { pending.tanh_(); }}) {
        std::string error;
        try {
          call();
        } catch (const c10::Error& e) {
          error = e.what_without_backtrace();
        }
        dt::require(error.find(words) != std::string::npos, "test", "it was not refused: {}", error);
      }
    }, transport));
  }
}

TEST_CASE("dispatch: ranks that have been busy on a smaller mesh remember other calls", "[dispatch]") {
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(4, [](dt::World& world) {
      const dt::DeviceMesh all(torch::kCPU, {0, 1, 2, 3}, {4}, {"all"}), pair(torch::kCPU, {0, 1}, {2}, {"pair"});
      const auto plain = torch::arange(3, torch::kDouble);
      const auto use = [&] {
        const dt::Spmd region(all);
        same(torch::ones({8, 3}, torch::kDouble).mul(plain), torch::ones({8, 3}, torch::kDouble).mul(plain), "beside a plain tensor");
      };
      use();
      if (world.rank() < 2) {
        const auto row = dt::distribute_tensor(torch::ones({10000}), pair, {dt::replicate()}).tensor();
        for (int64_t i = 1; i < 10000; ++i) row.narrow(0, 0, i);  // more decisions than are kept
      }
      use();
    }, transport));
  }
}

TEST_CASE("dispatch: autograd sees what foreach operators write", "[dispatch]") {
  const auto stale = [](const at::Tensor& leaf) {
    const auto y = leaf * 1, z = y * y;
    at::_foreach_mul_({y}, 3);
    try {
      z.sum().backward();
    } catch (const c10::Error&) {
      return true;
    }
    return false;
  };
  REQUIRE(stale(torch::ones({4}).requires_grad_()));
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const auto leaf = dt::distribute_tensor(torch::ones({4}), line(world), {dt::shard(0)}).tensor().requires_grad_();
    dt::require(stale(leaf), "test", "the backward used what had been overwritten");
  }));
}

TEST_CASE("dispatch: outside of Spmd a backward makes tensors of its own", "[dispatch]") {
  const auto gradients = [](const at::Tensor& leaf) {
    std::vector<at::Tensor> all;
    for (const auto& part : {leaf.split(1, 1)[0], leaf.chunk(2)[1], leaf.unbind(0)[1], leaf.prod(), leaf.cumprod(0), std::get<0>(leaf.max(0)),
                             std::get<0>(leaf.sort(1)), leaf.diagonal()}) {
      all.push_back(torch::autograd::grad({part.sum()}, {leaf})[0]);
    }
    return all;
  };
  const auto values = counting({4, 3}) + 0.1;
  const auto expected = gradients(values.clone().requires_grad_());
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
      for (const auto& placement : {dt::replicate(), dt::shard(0), dt::shard(1)}) {
        const auto got = gradients(dt::distribute_tensor(values, line(world), {placement}).tensor().requires_grad_());
        for (size_t i = 0; i < got.size(); ++i) {
          dt::require(dt::full_tensor(got[i]).allclose(expected[i]), "test", "gradient {} of {}", i, str(placement));
        }
        std::string error;
        try {
          torch::cat({got[0], torch::ones({4, 3}, torch::kDouble)});  // as decided on in a backward, perhaps
        } catch (const dt::Error& e) {
          error = e.what_without_backtrace();
        }
        dt::require(error.find("a plain tensor meets distributed ones") != std::string::npos, "test", "got {}", error);
      }
    }, transport));
  }
}

TEST_CASE("dispatch: inference mode", "[dispatch]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const dt::DeviceMesh& mesh) {
    const dt::Spmd spmd(mesh);
    torch::nn::Linear layer(4, 6);
    const auto input = at::arange(24.0).view({2, 3, 4});
    const auto x = dt::distribute_tensor(input, mesh, {dt::shard(1)}).tensor();
    const auto weight = dt::full_tensor(layer->weight.detach()), bias = dt::full_tensor(layer->bias.detach());
    const c10::InferenceMode inference;
    const auto y = layer(x);
    dt::require(y.is_inference() && !y.requires_grad(), "test", "tracked");
    dt::require(dt::full_tensor(y).allclose(at::linear(input, weight, bias)), "test", "the output differs");
    dt::require(dt::full_tensor(x.transpose(0, 1).reshape({3, 8})).equal(input.transpose(0, 1).reshape({3, 8})), "test", "the view differs");
    dt::require(dt::full_tensor(at::softmax(y.matmul(layer->weight), -1)).sizes() == input.sizes(), "test", "other sizes");
    auto written = y.clone();
    written.add_(1).select(1, 0).zero_();
    dt::require(dt::full_tensor(written).select(1, 0).abs().max().item<float>() == 0, "test", "not written");
  }));
}
