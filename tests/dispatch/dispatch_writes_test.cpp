// Writes to DTensors, what autograd sees of them, and what ranks remember of calls.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/op_check.hpp"
#include "tests/support/words_of.hpp"

#include <sstream>
#include <thread>

namespace dt = dtensor;
using namespace dt::test;
using dt::comm::Collective;

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
    const auto view = x->slice(1, 5, 7);  // of the second rank's shard
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
    const auto words = words_of([&] { torch::mm_out(wrong, rows, rows); });
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
        const auto error = words_of(call);
        dt::require(error.find(words) != std::string::npos, "test", "it was not refused: {}", error);
      }
    }, transport));
  }
}

TEST_CASE("dispatch: a copy out of place leaves a pending operand as it was", "[dispatch]") {
  REQUIRE_NOTHROW(on_ranks(3, [](dt::World& world) {
    const auto mesh = line(world);
    const auto pending = dt::from_local(torch::ones({2, 3}, torch::kDouble), mesh, {dt::partial()}).tensor();
    const auto source = dt::distribute_tensor(counting({2, 3}), mesh, {dt::replicate()}).tensor();
    const auto copied = at::copy(pending, source);
    dt::require(dt::full_tensor(copied).equal(counting({2, 3})), "test", "the copy differs");
    dt::require(dt::full_tensor(pending).eq(3).all().item<bool>(), "test", "the operand was written to");
  }));
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
    for (const auto& part : {leaf.split(1, 1)[0], leaf.chunk(2)[1], leaf.unbind(0)[1], leaf.prod(), leaf.cumprod(0),
                             std::get<0>(leaf.max(0)), std::get<0>(leaf.sort(1)), leaf.diagonal()}) {
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
        const auto plain = torch::ones({4, 3}, torch::kDouble);
        const auto error = words_of<dt::Error>([&] { torch::cat({got[0], plain}); });  // as decided on in a backward, perhaps
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
    dt::require(dt::full_tensor(x.transpose(0, 1).reshape({3, 8})).equal(input.transpose(0, 1).reshape({3, 8})), "test",
                "the view differs");
    dt::require(dt::full_tensor(at::softmax(y.matmul(layer->weight), -1)).sizes() == input.sizes(), "test", "other sizes");
    auto written = y.clone();
    written.add_(1).select(1, 0).zero_();
    dt::require(dt::full_tensor(written).select(1, 0).abs().max().item<float>() == 0, "test", "not written");
  }));
}
