// A backward pass in two halves gives the bits of a whole one, frees what only the first half needed, and runs every hook once.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/parallel/pipeline/split_backward.hpp>
#include <dtensor/training/checkpoint.hpp>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

using namespace dtensor;
using namespace dtensor::test;

namespace {

using Forward = std::function<Tensors(const at::Tensor& x)>;

// Products and layer norms that this thread runs while it lives.
class CountKernels {
 public:
  CountKernels() {
    counts = 0;
    handle_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
                                     const std::string name = f.name();
                                     counts += name == "aten::mm" || name == "aten::addmm";
                                     return nullptr;
                                   }).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountKernels() { at::removeCallback(handle_); }
  CountKernels(const CountKernels&) = delete;
  CountKernels& operator=(const CountKernels&) = delete;
  static int take() { return std::exchange(counts, 0); }

 private:
  static thread_local int counts;
  at::CallbackHandle handle_;
};
thread_local int CountKernels::counts = 0;

Tensors random_like(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(torch::randn_like(tensor));
  return result;
}

Tensors take_gradients(const Tensors& parameters) {
  Tensors gradients;
  for (auto parameter : parameters) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

void check_equal(const Tensors& a, const Tensors& b, const char* what) {
  require(a.size() == b.size(), "test", "{}: {} and {}", what, a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    require(a[i].defined() == b[i].defined(), "test", "{}: gradient {} is there in one run only", what, i);
    require(!a[i].defined() || full_tensor(a[i]).equal(full_tensor(b[i])), "test", "{}: gradient {} differs", what, i);
  }
}

// The same forward, whole and in halves. The parameters are untouched between the halves.
void check_halves(const at::Tensor& values, const Tensors& parameters, const Forward& forward) {
  const auto run = [&](const std::function<at::Tensor(const Tensors&, const Tensors&, const at::Tensor&)>& backward) {
    auto x = values.detach().clone().requires_grad_();
    torch::manual_seed(5);
    const auto outputs = forward(x);
    Tensors result{backward(outputs, random_like(outputs), x)};
    for (auto& gradient : take_gradients(parameters)) result.push_back(gradient);
    return result;
  };
  const auto whole = run([](const Tensors& outputs, const Tensors& gradients, const at::Tensor& x) {
    torch::autograd::backward(outputs, gradients);
    return x.grad();
  });
  const auto halves = run([&](const Tensors& outputs, const Tensors& gradients, const at::Tensor& x) {
    auto [of_inputs, weights] = backward_inputs(outputs, gradients, {x});
    for (const auto& parameter : parameters) require(!parameter.grad().defined(), "test", "a parameter's gradient was computed in I");
    require(!x.grad().defined(), "test", "the input's gradient was added to it");
    weights.run();
    require(weights.empty(), "test", "W left something");
    weights.run();
    return of_inputs[0];
  });
  check_equal(whole, halves, "halves");
}

at::Tensor parameter(at::IntArrayRef sizes) { return (torch::randn(sizes) * 0.3).detach().requires_grad_(); }

struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1] * 2, gradients[0] * saved[0] * 2};
  }
};

}  // namespace

TEST_CASE("halves of backward: one device's bits for many graphs", "[pipeline]") {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    torch::manual_seed(1);
    const auto options = torch::TensorOptions(dtype);
    const auto x = torch::randn({8, 16}, options);
    const auto make = [&](at::IntArrayRef sizes) { return parameter(sizes).detach().to(dtype).requires_grad_(); };
    const auto up = make({64, 16}), bias = make({64}), down = make({16, 64}), w = make({16, 16}), scale = make({16}), shift = make({16});
    const Forward block = [&](const at::Tensor& in) -> Tensors {
      const auto h = at::layer_norm(in, {16}, scale, shift);
      return {at::matmul(h + at::linear(at::gelu(at::linear(h, up, bias)), down), w)};
    };
    check_halves(x, {up, bias, down, w, scale, shift}, block);
    // A parameter that is used twice on one way, of whose uses one lies behind the other.
    check_halves(x, {w}, [&](const at::Tensor& in) -> Tensors { return {at::matmul(at::matmul(in, w), w).sum()}; });
    check_halves(x, {w}, [&](const at::Tensor& in) -> Tensors { return {at::matmul(at::tanh(at::matmul(in, w)), w + w * w)}; });
    // A node with several results, which come back in another order.
    check_halves(x, {w}, [&](const at::Tensor& in) -> Tensors {
      const auto halves = at::matmul(in, w).chunk(2, 1);
      return {at::cat({halves[1] * w.sum(), halves[0]}, 1)};
    });
    check_halves(x, {w}, [&](const at::Tensor& in) -> Tensors {  // several outputs, and one that the other is made of
      const auto h = at::matmul(in, w), narrow = h.narrow(1, 3, 4).transpose(0, 1);
      return {h, narrow.reshape({-1}) * 2, h.sum()};
    });
    // Outputs that do not depend on the input, alone and beside others.
    check_halves(x, {w, scale}, [&](const at::Tensor& in) -> Tensors { return {at::matmul(in, w), (w * w).sum() + scale.sum()}; });
    check_halves(x, {w, scale}, [&](const at::Tensor&) -> Tensors { return {at::matmul(w, w) * scale}; });
    // No parameter at all, one that is frozen, one that is not used.
    check_halves(x, {}, [&](const at::Tensor& in) -> Tensors { return {at::gelu(in)}; });
    check_halves(x, {w, scale, shift},
                 [&](const at::Tensor& in) -> Tensors { return {at::layer_norm(at::matmul(in, w.detach()), {16}, scale, {})}; });
    check_halves(x, {w, scale},
                 [&](const at::Tensor& in) -> Tensors { return {Doubled::apply(Doubled::apply(at::matmul(in, w), scale), scale)}; });
    check_halves(x, {up, bias, down, w, scale, shift}, [&](const at::Tensor& in) -> Tensors {
      return {checkpoint([&](const at::Tensor& y) { return block(y)[0]; }, at::matmul(at::dropout(in, 0.5, true), w))};
    });
  }
}

TEST_CASE("halves of backward: each product is computed once", "[pipeline]") {
  torch::manual_seed(1);
  const auto up = parameter({64, 16}), down = parameter({16, 64});
  const auto x = torch::randn({8, 16}).requires_grad_();
  const auto forward = [&] { return at::linear(at::gelu(at::linear(x, up)), down); };
  const auto y = forward(), again = forward();
  const CountKernels count;
  torch::autograd::backward({y}, {torch::ones_like(y)});
  CHECK(count.take() == 4);
  auto [gradients, weights] = backward_inputs({again}, {torch::ones_like(again)}, {x});
  CHECK(count.take() == 2);
  weights.run();
  CHECK(count.take() == 2);
}

TEST_CASE("halves of backward: what only the first half needed is freed after it", "[pipeline]") {
  const auto up = parameter({64, 16}), down = parameter({16, 64});
  const auto x = torch::randn({8, 16}).requires_grad_();
  c10::weak_intrusive_ptr<c10::TensorImpl> before_gelu(c10::intrusive_ptr<c10::TensorImpl>{}), after_gelu = before_gelu;
  at::Tensor y;
  {
    const auto h = at::linear(x, up), active = at::gelu(h);
    before_gelu = c10::weak_intrusive_ptr<c10::TensorImpl>(h.getIntrusivePtr());
    after_gelu = c10::weak_intrusive_ptr<c10::TensorImpl>(active.getIntrusivePtr());
    y = at::linear(active, down);
  }
  REQUIRE((!before_gelu.expired() && !after_gelu.expired()));
  auto half = backward_inputs({y}, {torch::ones_like(y)}, {x});
  y = at::Tensor();
  CHECK(before_gelu.expired());
  CHECK(!after_gelu.expired());  // the gradient of `down` comes from it
  half.weights.run();
  CHECK(after_gelu.expired());
}

namespace {

// A linear layer and its activation inside a checkpoint region. It remembers what the region computed last: `up(x)` and gelu(up(x)).
struct Region {
  using Watched = c10::weak_intrusive_ptr<c10::StorageImpl>;
  static Watched nothing() { return Watched(c10::intrusive_ptr<c10::StorageImpl>{}); }
  static Watched watch(const at::Tensor& tensor) {
    return Watched(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(tensor.storage().unsafeGetStorageImpl()));
  }
  at::Tensor operator()(const at::Tensor& x) {
    ++calls;
    const auto h = at::linear(x, up), active = at::gelu(h);
    before_gelu = watch(h), after_gelu = watch(active);
    return at::linear(active, down);
  }
  at::Tensor up = parameter({64, 16}), down = parameter({16, 64});
  int calls = 0;
  Watched before_gelu = nothing(), after_gelu = nothing();
};

}  // namespace

TEST_CASE("halves of backward: a checkpoint region runs again once", "[pipeline][checkpoint]") {
  torch::manual_seed(1);
  Region first, second;
  const auto x = torch::randn({8, 16}).requires_grad_();
  const auto apply = [](Region& region) { return [&region](const at::Tensor& in) { return region(in); }; };
  auto y = checkpoint(apply(second), checkpoint(apply(first), x));
  CHECK((first.after_gelu.expired() && second.after_gelu.expired()));
  auto half = backward_inputs({y.sum()}, {at::Tensor()}, {x});
  y = at::Tensor();
  for (auto* region : {&first, &second}) {
    CHECK(region->calls == 2);
    CHECK(region->before_gelu.expired());
    CHECK(!region->after_gelu.expired());  // the gradient of `down` comes from it
  }
  half.weights.run();
  for (auto* region : {&first, &second}) {
    CHECK(region->calls == 2);
    CHECK(region->after_gelu.expired());
  }
  // Nested, and with the bits of a whole backward.
  const auto both = [&](const at::Tensor& in) -> Tensors {
    return {checkpoint([&](const at::Tensor& t) { return second(checkpoint(apply(first), t)); }, in)};
  };
  const Tensors parameters{first.up, first.down, second.up, second.down};
  take_gradients(parameters);
  check_halves(x, parameters, both);
  CHECK(first.after_gelu.expired());
  CHECK(second.after_gelu.expired());
}

TEST_CASE("halves of backward: the first half frees what a node saved when it has run", "[pipeline]") {
  Region region;
  const auto x = torch::randn({8, 16}).requires_grad_();
  auto h = x * 2;
  bool freed = false;
  h.register_hook([&](const at::Tensor&) { freed = region.before_gelu.expired(); });
  const auto y = region(h);
  h = at::Tensor();
  auto half = backward_inputs({y}, {torch::ones_like(y)}, {x});
  CHECK(freed);
  CHECK(!region.after_gelu.expired());
}

TEST_CASE("halves of backward: every hook runs once", "[pipeline]") {
  const auto w = parameter({16, 16}), b = parameter({16});
  const auto x = torch::randn({8, 16}).requires_grad_();
  int of_result = 0, of_weight = 0;
  const auto h = at::linear(x, w, b);
  h.register_hook([&](const at::Tensor& gradient) {
    ++of_result;
    return gradient * 3;
  });
  h.retain_grad();
  w.register_hook([&](const at::Tensor&) { ++of_weight; });
  const auto y = at::linear(h, w);
  auto [gradients, weights] = backward_inputs({y}, {torch::ones_like(y)}, {x});
  CHECK(of_result == 1);
  CHECK(of_weight == 0);
  weights.run();
  CHECK(of_result == 1);
  CHECK(of_weight == 1);
  const auto into_h = at::matmul(torch::ones_like(y), w) * 3;
  CHECK(gradients[0].equal(at::matmul(into_h, w)));
  CHECK(b.grad().equal(into_h.sum(0)));
  CHECK(h.grad().equal(into_h));
}

TEST_CASE("halves of backward: without an input all is the second half", "[pipeline]") {
  const auto w = parameter({16, 16});
  const auto ids = torch::randn({8, 16});
  const auto y = at::matmul(ids, w).sum();
  auto [gradients, weights] = backward_inputs({y}, {at::Tensor()}, {ids, at::Tensor()});
  CHECK((gradients.size() == 2 && !gradients[0].defined() && !gradients[1].defined()));
  CHECK(!w.grad().defined());
  weights.run();
  CHECK(w.grad().equal(at::matmul(ids.t(), torch::ones({8, 16}))));
}

TEST_CASE("halves of backward: a graph of a hundred thousand nodes", "[pipeline]") {
  const auto w = parameter({2}), x = torch::randn({2}).requires_grad_();
  auto y = x * 1;
  for (int i = 0; i < 50'000; ++i) y = i % 100 == 0 ? y * w : y + 1;
  auto half = backward_inputs({y.sum()}, {at::Tensor()}, {x});
  y = at::Tensor();
  CHECK(half.gradients[0].defined());
  half.weights.run();
  CHECK(w.grad().defined());
}

TEST_CASE("halves of backward: sharded tensors", "[pipeline]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        2,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"tp"});
          const Spmd spmd(mesh);
          torch::manual_seed(3);
          const auto up = at::Tensor(distribute_tensor(torch::randn({8, 4}), mesh, {shard(0)})).detach().requires_grad_();
          const auto down = at::Tensor(distribute_tensor(torch::randn({4, 8}), mesh, {shard(1)})).detach().requires_grad_();
          const auto norm = torch::ones({4}).requires_grad_();
          const auto x = at::Tensor(distribute_tensor(torch::randn({6, 4}), mesh, {replicate()}));
          check_halves(x, {up, down, norm}, [&](const at::Tensor& in) -> Tensors {
            return {at::linear(at::gelu(at::linear(at::layer_norm(in, {4}, norm), up)), down) + in};
          });
        },
        transport));
  }
}

TEST_CASE("halves of backward: what it refuses", "[pipeline][errors]") {
  const auto w = parameter({2, 2}), x = torch::randn({2, 2}).requires_grad_();
  const auto y = at::matmul(x, w);
  CHECK_THROWS_WITH(backward_inputs({y}, {}, {x}), says("got 0 gradients of 1 outputs"));
  CHECK_THROWS_WITH(backward_inputs({y}, {at::Tensor()}, {x}), says("output 0 has sizes [2, 2] and no gradient"));
  CHECK_THROWS_WITH(backward_inputs({y}, {torch::ones({4})}, {x}), says("the gradient of output 0 has sizes [4]; expected [2, 2]"));
  CHECK_THROWS_WITH(backward_inputs({y, y.detach()}, {y, y}, {x}), says("output 1 needs no gradient"));
  CHECK_THROWS_WITH(backward_inputs({y}, {y}, {y * 2}), says("input 0 is the result of an operator"));
}
