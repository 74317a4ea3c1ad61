// An operator of your own on a mesh: registered with libtorch, given a sharding rule in one line, explained, run, differentiated.
//
//   ./custom_op --ranks 4
#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <iostream>

namespace dt = dtensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// The gated unit of a transformer: silu(x gate) * (x up). x [tokens, dim], gate and up [dim, hidden]; result [tokens, hidden].
torch::Tensor swiglu(const torch::Tensor& x, const torch::Tensor& gate, const torch::Tensor& up);

torch::Tensor swiglu_cpu(const torch::Tensor& x, const torch::Tensor& gate, const torch::Tensor& up) {
  return torch::silu(x.mm(gate)).mul_(x.mm(up));  // a fused kernel's place
}

struct Swiglu : torch::autograd::Function<Swiglu> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x, const torch::Tensor& gate, const torch::Tensor& up) {
    context->save_for_backward({x, gate, up});
    at::AutoDispatchBelowADInplaceOrView below;
    return swiglu(x, gate, up);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &gate = saved[1], &up = saved[2], &g = gradients[0];
    const auto a = x.mm(gate), sigmoid = a.sigmoid();
    const auto g_up = g * a * sigmoid, g_a = g * x.mm(up) * sigmoid * (1 + a * (1 - sigmoid));
    return {g_a.mm(gate.t()) + g_up.mm(up.t()), x.t().mm(g_a), x.t().mm(g_up)};
  }
};

torch::Tensor swiglu_autograd(const torch::Tensor& x, const torch::Tensor& gate, const torch::Tensor& up) {
  return Swiglu::apply(x, gate, up);
}

TORCH_LIBRARY(example, library) { library.def("swiglu(Tensor x, Tensor gate, Tensor up) -> Tensor"); }
TORCH_LIBRARY_IMPL(example, CPU, library) { library.impl("swiglu", TORCH_FN(swiglu_cpu)); }
TORCH_LIBRARY_IMPL(example, AutogradCPU, library) { library.impl("swiglu", TORCH_FN(swiglu_autograd)); }

torch::Tensor swiglu(const torch::Tensor& x, const torch::Tensor& gate, const torch::Tensor& up) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("example::swiglu", "").typed<decltype(swiglu)>();
  return op.call(x, gate, up);
}

void run(dt::World& world) {
  const auto mesh =
      dt::init_device_mesh(torch::kCPU, {world.size() % 2 ? 1 : 2, world.size() % 2 ? world.size() : world.size() / 2}, {"dp", "tp"});
  torch::manual_seed(0);
  const auto x = torch::randn({6, 8}), gate = torch::randn({8, 12}), up = torch::randn({8, 12});
  const auto loss = [](const torch::Tensor& a, torch::Tensor b, torch::Tensor c) {
    b = b.detach().requires_grad_();
    const auto value = swiglu(a, b, c).square().sum();
    value.backward();
    return std::pair(value, b.grad());
  };
  const dt::DTensor X = dt::distribute_tensor(x, mesh, {dt::shard(0), dt::replicate()});
  const dt::DTensor G = dt::distribute_tensor(gate, mesh, {dt::replicate(), dt::shard(1)});
  const dt::DTensor U = dt::distribute_tensor(up, mesh, {dt::replicate(), dt::shard(1)});
  if (world.rank() == 0) std::cout << dt::explain("example::swiglu", X, G, U).str() << '\n' << dt::visualize(swiglu(X, G, U)) << '\n';
  const auto [expected, expected_gradient] = loss(x, gate, up);
  const auto [got, got_gradient] = loss(X, G, U);
  const bool same = dt::full_tensor(got).allclose(expected, 1e-4) && dt::full_tensor(got_gradient).allclose(expected_gradient, 1e-3, 1e-4);
  if (world.rank() == 0) std::cout << "loss and gradient " << (same ? "are" : "are NOT") << " those of one device\n";
  if (!same) throw std::runtime_error("the results differ from one device's");
}

}  // namespace

int main(int argc, char** argv) {
  // Tokens and hidden units are independent; a sum over dim comes before silu, which is not linear, so dim stays whole.
  dt::register_rule("example::swiglu", "td,dh,dh->th", {.whole = "d"});
  return dt::launch(argc, argv, run);
}
