// quantile and nanquantile from public operators: a sort along the dim, and a mean of the two neighbours of each position in it.
// libtorch composes them too, but since 2.14 it selects elements through pointers.
#include "ops/composite/composite.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace dtensor::dispatch {

namespace {

struct Quantiles {
  at::Tensor self, q;  // a number or a list of them
  c10::optional<int64_t> dim;
  bool keepdim, ignores_nan;
  std::string interpolation;

  at::Tensor result() const {
    const bool all = !dim || self.dim() == 0;
    const int64_t along = all ? 0 : c10::maybe_wrap_dim(*dim, self.dim());
    std::vector<int64_t> ones(self.dim(), 1);
    ones.push_back(-1);
    const auto rows = all ? self.reshape(ones) : self.unsqueeze(-1).transpose(along, -1);  // the dim is the last, and one where it was
    const auto sorted = std::get<0>(rows.sort(-1));
    auto result = between_neighbours(sorted, positions(sorted));
    if (!keepdim) result = all ? result.reshape({-1}) : result.squeeze(along);
    return q.dim() == 0 ? result.squeeze(-1) : result.unsqueeze(0).transpose(0, -1).squeeze(-1);
  }

 private:
  // In the sorted rows, [..., quantiles]. NaN is sorted to the end: a row with one is NaN, or ends before it.
  at::Tensor positions(const at::Tensor& sorted) const {
    const auto fractions = q.reshape({-1});
    const auto last = sorted.size(-1) - 1;
    const auto nan = sorted.isnan();
    if (ignores_nan) return nan.logical_not().sum(-1, true).sub(1).mul(fractions).clamp_min(0);
    return at::where(nan.any(-1, true), at::full_like(fractions, static_cast<double>(last)), fractions.mul(last));
  }

  at::Tensor between_neighbours(const at::Tensor& sorted, const at::Tensor& position) const {
    const auto value_at = [&](const at::Tensor& whole) { return sorted.gather(-1, whole.to(at::kLong)); };
    const auto below = position.floor();
    if (interpolation == "lower") return value_at(below);
    if (interpolation == "higher") return value_at(position.ceil());
    if (interpolation == "nearest") return value_at(position.round());
    const auto weight = interpolation == "midpoint" ? at::full_like(position, 0.5) : position.sub(below);
    return value_at(below).lerp(value_at(position.ceil()), weight);
  }
};

// Throws what libtorch says of such arguments, by calling it with few elements.
void check(const c10::OperatorHandle& op, c10::Stack arguments) {
  plain([&] {
    const auto self = arguments[0].toTensor();
    auto few = self.sizes().vec();
    for (auto& size : few) size = std::min<int64_t>(size, 2);
    arguments[0] = at::zeros(few, self.options());
    if (arguments[1].isTensor() && is_dtensor(arguments[1].toTensor())) arguments[1] = DTensor(arguments[1].toTensor()).full_tensor();
    op.callBoxed(&arguments);
    return at::Tensor();
  });
}

void quantile(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto begin = stack->size() - op.schema().arguments().size();
  const auto argument = [&](size_t i) -> c10::IValue& { return (*stack)[begin + i]; };
  const auto self = argument(0).toTensor();
  auto q = argument(1).isTensor() ? argument(1).toTensor() : at::Tensor();
  if (!is_dtensor(self) && !(q.defined() && is_dtensor(q))) return op.redispatchBoxed(below(keys), stack);
  check(op, c10::Stack(stack->begin() + static_cast<int64_t>(begin), stack->end()));
  if (!q.defined()) q = plain([&] { return at::scalar_tensor(argument(1).toDouble(), self.options()); });
  const auto& like = is_dtensor(self) ? self : q;
  const Quantiles quantiles{beside(like, self),
                            q.requires_grad() ? q : beside(like, q),
                            argument(2).toOptional<int64_t>(),
                            argument(3).toBool(),
                            op.schema().name() == "aten::nanquantile",
                            argument(4).toStringRef()};
  stack->resize(begin);
  stack->emplace_back(quantiles.result());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  for (const auto* name : {"quantile", "quantile.scalar", "nanquantile", "nanquantile.scalar"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&quantile>());
  }
}

}  // namespace

}  // namespace dtensor::dispatch
