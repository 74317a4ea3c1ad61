// The operator of swiglu.hpp on the CPU: dtensor::swiglu, its gradient and their sharding rules.
#include <dtensor/nn/swiglu.hpp>

#include <dtensor/base/vectors/exp_series.hpp>
#include <dtensor/tensor/custom_op.hpp>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

namespace dtensor::nn {

namespace {

#define DTENSOR_KERNEL "src/nn/swiglu_kernel.inl"
#include <dtensor/base/vectors/instruction_sets.inl>

constexpr int64_t kGrain = 16384;

template <class T>
void forward_of(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& y) {
  const auto *g = gate.data_ptr<T>(), *u = up.data_ptr<T>();
  auto* const to = y.data_ptr<T>();
  at::parallel_for(0, y.numel(), kGrain, [&](int64_t i, int64_t end) { DTENSOR_BEST(gate_all, g + i, u + i, to + i, end - i); });
}

template <class T>
void backward_of(const at::Tensor& gradient, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& of_gate,
                 const at::Tensor& of_up) {
  const auto *d = gradient.data_ptr<T>(), *g = gate.data_ptr<T>(), *u = up.data_ptr<T>();
  auto *const to_gate = of_gate.data_ptr<T>(), *const to_up = of_up.data_ptr<T>();
  at::parallel_for(0, gate.numel(), kGrain, [&](int64_t i, int64_t end) {
    DTENSOR_BEST(gate_all_back, d + i, g + i, u + i, to_gate + i, to_up + i, end - i);
  });
}

at::Tensor swiglu_cpu(const at::Tensor& gate, const at::Tensor& up) {
  const auto y = at::empty(gate.sizes(), gate.options());
  AT_DISPATCH_FLOATING_TYPES(gate.scalar_type(), "swiglu", [&] { forward_of<scalar_t>(gate.contiguous(), up.contiguous(), y); });
  return y;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cpu(const at::Tensor& gradient, const at::Tensor& gate, const at::Tensor& up) {
  const auto of_gate = at::empty(gate.sizes(), gate.options()), of_up = at::empty(gate.sizes(), gate.options());
  AT_DISPATCH_FLOATING_TYPES(gate.scalar_type(), "swiglu_backward", [&] {
    backward_of<scalar_t>(gradient.contiguous(), gate.contiguous(), up.contiguous(), of_gate, of_up);
  });
  return {of_gate, of_up};
}

at::Tensor swiglu_meta(const at::Tensor& gate, const at::Tensor&) { return at::empty(gate.sizes(), gate.options()); }
std::tuple<at::Tensor, at::Tensor> swiglu_backward_meta(const at::Tensor&, const at::Tensor& gate, const at::Tensor&) {
  return {at::empty(gate.sizes(), gate.options()), at::empty(gate.sizes(), gate.options())};
}

at::Tensor call_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("dtensor::swiglu", "").typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(gate, up);
}

std::tuple<at::Tensor, at::Tensor> call_backward(const at::Tensor& gradient, const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dtensor::swiglu_backward", "")
                             .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  return op.call(gradient, gate, up);
}

class Gate : public torch::autograd::Function<Gate> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_swiglu(gate, up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1], &gradient = gradients[0];
    if (at::GradMode::is_enabled()) {  // of libtorch's operators, where the gradients have gradients
      const auto s = gate.sigmoid();
      return {gradient.mul(up).mul(s.mul(gate.mul(s.neg().add(1)).add(1))), gradient.mul(gate.mul(s))};
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [of_gate, of_up] = call_backward(gradient, gate, up);
    return {of_gate, of_up};
  }
};

at::Tensor swiglu_autograd(const at::Tensor& gate, const at::Tensor& up) {
  if (at::GradMode::is_enabled() && (gate.requires_grad() || up.requires_grad())) return Gate::apply(gate, up);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_swiglu(gate, up);
}

TORCH_LIBRARY_FRAGMENT(dtensor, library) {
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.def("swiglu_backward(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(dtensor, CPU, library) {
  library.impl("swiglu", swiglu_cpu);
  library.impl("swiglu_backward", swiglu_backward_cpu);
}
TORCH_LIBRARY_IMPL(dtensor, Meta, library) {
  library.impl("swiglu", swiglu_meta);
  library.impl("swiglu_backward", swiglu_backward_meta);
}
TORCH_LIBRARY_IMPL(dtensor, Autograd, library) { library.impl("swiglu", swiglu_autograd); }

}  // namespace

at::Tensor detail::gated(const at::Tensor& gate, const at::Tensor& up) {
  const bool takes = gate.scalar_type() == at::kFloat || gate.scalar_type() == at::kDouble;
  const bool has_kernel = takes && up.scalar_type() == gate.scalar_type() && gate.dim() > 0 && gate.sizes() == up.sizes() &&
                          (gate.is_cpu() || gate.is_meta()) && gate.device() == up.device();
  if (!has_kernel) return at::silu(gate) * up;
  [[maybe_unused]] static const bool has_rules = [] {
    register_rule("dtensor::swiglu", "...d,...d->...d");
    register_rule("dtensor::swiglu_backward", "...d,...d,...d->...d,...d");
    return true;
  }();
  return call_swiglu(gate, up);
}

}  // namespace dtensor::nn
