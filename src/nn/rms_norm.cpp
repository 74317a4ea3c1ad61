// The operator of rms_norm.hpp on the CPU: dtensor::rms_norm, its gradient and their sharding rules.
#include <dtensor/nn/rms_norm.hpp>

#include <dtensor/tensor/custom_op.hpp>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace dtensor::nn {

namespace {

#define DTENSOR_KERNEL "src/nn/rms_norm_kernel.inl"
#include <dtensor/base/vectors/instruction_sets.inl>

constexpr int64_t kGrain = 16384;

int64_t rows_of(const at::Tensor& x) { return x.numel() / std::max<int64_t>(1, x.size(-1)); }
int64_t grain_of(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

at::Tensor rms_norm_cpu(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const auto from = x.contiguous(), factors = weight.contiguous();
  const auto y = at::empty(x.sizes(), x.options());
  const auto dim = x.size(-1);
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
    const auto *in = from.data_ptr<scalar_t>(), *w = factors.data_ptr<scalar_t>();
    auto* const out = y.data_ptr<scalar_t>();
    at::parallel_for(0, rows_of(x), grain_of(dim), [&](int64_t row, int64_t end) {
      DTENSOR_BEST(normalize, in + row * dim, w, end - row, dim, eps, out + row * dim);
    });
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_cpu(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
                                                         double eps) {
  const auto gradients = gradient.contiguous(), from = x.contiguous(), factors = weight.contiguous();
  const auto of_x = at::empty(x.sizes(), x.options()), of_weight = at::empty(weight.sizes(), weight.options());
  const auto dim = x.size(-1), rows = rows_of(x);
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x.scalar_type(), "rms_norm_backward", [&] {
    const auto *g = gradients.data_ptr<scalar_t>(), *in = from.data_ptr<scalar_t>(), *w = factors.data_ptr<scalar_t>();
    auto *const to = of_x.data_ptr<scalar_t>(), *const to_weight = of_weight.data_ptr<scalar_t>();
    std::vector<at::opmath_type<scalar_t>> scales(static_cast<size_t>(rows));
    at::parallel_for(0, rows, grain_of(dim), [&](int64_t row, int64_t end) {
      const auto first = row * dim;
      DTENSOR_BEST(pull_back, g + first, in + first, w, end - row, dim, eps, scales.data() + row, to + first);
    });
    at::parallel_for(0, dim, grain_of(rows), [&](int64_t column, int64_t end) {
      std::vector<double> sums(static_cast<size_t>(end - column));
      DTENSOR_BEST(add_columns, g + column, in + column, scales.data(), rows, dim, end - column, sums.data());
      for (auto i = column; i < end; ++i) to_weight[i] = static_cast<scalar_t>(static_cast<at::opmath_type<scalar_t>>(sums[i - column]));
    });
  });
  return {of_x, of_weight};
}

at::Tensor rms_norm_meta(const at::Tensor& x, const at::Tensor&, double) { return at::empty(x.sizes(), x.options()); }
std::tuple<at::Tensor, at::Tensor> rms_norm_backward_meta(const at::Tensor&, const at::Tensor& x, const at::Tensor& weight, double) {
  return {at::empty(x.sizes(), x.options()), at::empty(weight.sizes(), weight.options())};
}

at::Tensor call_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dtensor::rms_norm", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double)>();
  return op.call(x, weight, eps);
}

std::tuple<at::Tensor, at::Tensor> call_backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dtensor::rms_norm_backward", "")
                             .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, double)>();
  return op.call(gradient, x, weight, eps);
}

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps) {
    context->save_for_backward({x, weight});
    context->saved_data["eps"] = eps;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_rms_norm(x, weight, eps);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &gradient = gradients[0];
    const auto eps = context->saved_data["eps"].toDouble();
    if (at::GradMode::is_enabled()) return differentiable(gradient, x, weight, eps);
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [of_x, of_weight] = call_backward(gradient, x, weight, eps);
    return {of_x, of_weight, at::Tensor()};
  }

 private:
  // Of libtorch's operators, where the gradients have gradients.
  static torch::autograd::variable_list differentiable(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
                                                       double eps) {
    const auto scale = x.square().mean({-1}, /*keepdim=*/true).add(eps).rsqrt(), n = x.mul(scale), h = gradient.mul(weight);
    const auto of_x = scale.mul(h.sub(n.mul(h.mul(n).mean({-1}, /*keepdim=*/true))));
    return {of_x, gradient.mul(n).sum_to_size(weight.sizes()), at::Tensor()};
  }
};

at::Tensor rms_norm_autograd(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad())) return Normalize::apply(x, weight, eps);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_rms_norm(x, weight, eps);
}

TORCH_LIBRARY_FRAGMENT(dtensor, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(dtensor, CPU, library) {
  library.impl("rms_norm", rms_norm_cpu);
  library.impl("rms_norm_backward", rms_norm_backward_cpu);
}
TORCH_LIBRARY_IMPL(dtensor, Meta, library) {
  library.impl("rms_norm", rms_norm_meta);
  library.impl("rms_norm_backward", rms_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(dtensor, Autograd, library) { library.impl("rms_norm", rms_norm_autograd); }

}  // namespace

bool detail::has_kernel(const at::Tensor& x, const at::Tensor& weight) {
  const bool takes = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble || x.scalar_type() == at::kBFloat16;
  if (!takes || !(x.is_cpu() || x.is_meta()) || weight.scalar_type() != x.scalar_type() || x.dim() == 0) return false;
  if (x.size(-1) != weight.numel()) return false;  // which libtorch refuses, or spreads
  const auto* layout = find_layout(x);
  return !layout || std::ranges::none_of(layout->placements(), [&](const Placement& each) { return each.is_shard(x.dim() - 1); });
}

at::Tensor detail::normalized(const at::Tensor& x, const at::Tensor& weight, double eps) {
  [[maybe_unused]] static const bool has_rules = [] {
    register_rule("dtensor::rms_norm", "...d,d->...d", {.whole = "d"});
    register_rule("dtensor::rms_norm_backward", "...d,...d,d->...d,d", {.whole = "d"});
    return true;
  }();
  return call_rms_norm(x, weight, eps);
}

}  // namespace dtensor::nn
