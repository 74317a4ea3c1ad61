// Kernels for composite operators that read memory above autograd, where a DTensor has none. They are registered for the mode that every
// rank's thread is in, which libtorch calls before it takes the operator apart.
#include "ops/composite/composite.hpp"
#include "src/dispatch/copied_views.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/op_info.hpp"
#include "src/dispatch/out_form.hpp"

#include <dtensor/base/tensors_in.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/attention_hook.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_ctc_loss.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/ctc_loss_ops.h>
#include <ATen/ops/fill_diagonal_ops.h>
#include <ATen/ops/imag_ops.h>
#include <ATen/ops/max_pool1d_ops.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/real_ops.h>
#include <ATen/ops/select.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

namespace dtensor::dispatch {

at::Tensor beside(const at::Tensor& distributed, const at::Tensor& tensor) {
  if (is_dtensor(tensor)) return tensor;
  const auto& mesh = DTensor(distributed).mesh();
  const Placements whole(mesh.ndim(), replicate());
  return wrap(tensor, Layout::get(mesh, whole, tensor.sizes(), tensor.strides(), tensor.scalar_type()));
}

std::vector<int64_t> numbers(const at::Tensor& tensor) {
  const auto whole = is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
  const auto longs = plain([&] { return whole.to(at::kCPU, at::kLong).contiguous(); });
  return {longs.data_ptr<int64_t>(), longs.data_ptr<int64_t>() + longs.numel()};
}

namespace {

// Without gradients, libtorch's own takes a kernel that is no operator.
at::Tensor max_pool1d(c10::DispatchKeySet keys, const at::Tensor& self, at::IntArrayRef kernel, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  if (is_dtensor(self)) return std::get<0>(at::max_pool1d_with_indices(self, kernel, stride, padding, dilation, ceil_mode));
  return at::_ops::max_pool1d::redispatch(below(keys), self, kernel, stride, padding, dilation, ceil_mode);
}

// The diagonal of a tensor that is cut or a view is none of memory: it is where a mask says.
at::Tensor& fill_diagonal_(c10::DispatchKeySet keys, at::Tensor& self, const at::Scalar& value, bool wrap) {
  if (!is_dtensor(self)) return at::_ops::fill_diagonal_::redispatch(below(keys), self, value, wrap);
  const auto options = at::TensorOptions(at::kBool).device(self.device());
  const auto mask = plain([&] { return at::zeros(self.sizes(), options).fill_diagonal_(1, wrap); });
  return self.masked_fill_(beside(self, mask), value);
}

// libtorch's own makes a tensor of the lengths by pointer.
at::Tensor ctc_loss(c10::DispatchKeySet keys, const at::Tensor& log_probs, const at::Tensor& targets, at::IntArrayRef input_lengths,
                    at::IntArrayRef target_lengths, int64_t blank, int64_t reduction, bool zero_infinity) {
  if (!is_dtensor(log_probs)) {
    return at::_ops::ctc_loss_IntList::redispatch(below(keys), log_probs, targets, input_lengths, target_lengths, blank, reduction,
                                                  zero_infinity);
  }
  const bool is_batch = log_probs.dim() == 3;
  auto losses = std::get<0>(at::_ctc_loss(is_batch ? log_probs : log_probs.unsqueeze(1), targets.to(log_probs.device(), at::kLong),
                                          input_lengths, target_lengths, blank, zero_infinity));
  if (zero_infinity) losses = losses.masked_fill(losses.isinf(), 0);
  if (reduction == at::Reduction::Sum) return losses.sum();
  if (reduction != at::Reduction::Mean) return is_batch ? losses : losses.squeeze(0);
  const auto lengths = plain([&] { return at::tensor(target_lengths, losses.scalar_type()).clamp_min(1).to(losses.device()); });
  return losses.div(beside(losses, lengths)).mean();
}

at::Tensor ctc_loss_of_lengths(c10::DispatchKeySet keys, const at::Tensor& log_probs, const at::Tensor& targets,
                               const at::Tensor& input_lengths, const at::Tensor& target_lengths, int64_t blank, int64_t reduction,
                               bool zero_infinity) {
  if (!is_dtensor(log_probs)) {
    return at::_ops::ctc_loss_Tensor::redispatch(below(keys), log_probs, targets, input_lengths, target_lengths, blank, reduction,
                                                 zero_infinity);
  }
  return ctc_loss(keys, log_probs, targets, numbers(input_lengths), numbers(target_lengths), blank, reduction, zero_infinity);
}

// -- Boxed ------------------------------------------------------------------------------------------------------------

struct Operands {
  explicit Operands(c10::ArrayRef<c10::IValue> arguments) {
    for (const auto& in : tensors_in(arguments)) {
      if (!in.tensor.defined()) continue;
      if (is_dtensor(in.tensor)) distributed = in.tensor;
      needs_gradient |= in.tensor.requires_grad();
    }
    needs_gradient &= c10::GradMode::is_enabled();
  }
  at::Tensor distributed;  // one of them
  bool needs_gradient = false;
};

// Of operators that only look at values, or need all of them: on whole operands. Where gradients are needed, as libtorch does it.
void on_whole_operands(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto begin = stack->size() - op.schema().arguments().size();
  const std::vector<c10::IValue> originals(stack->begin() + static_cast<int64_t>(begin), stack->end());
  const Operands operands(originals);
  if (!operands.distributed.defined() || operands.needs_gradient) return op.redispatchBoxed(below(keys), stack);
  const auto& info = info_of(op);
  comm::Cause cause(info.name, true);
  const auto whole = [](const at::Tensor& tensor) {
    return tensor.defined() && is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
  };
  for (size_t i = 0; i < originals.size(); ++i) (*stack)[begin + i] = with_tensors(originals[i], whole);
  const std::vector<c10::IValue> wholes(stack->begin() + static_cast<int64_t>(begin), stack->end());
  plain([&] { return op.callBoxed(stack), at::Tensor(); });
  for (const int i : info.written) originals[i].toTensor().copy_(beside(operands.distributed, wholes[i].toTensor()));
  for (size_t r = 0; begin + r < stack->size(); ++r) {
    auto& value = (*stack)[begin + r];
    const int source = r < info.returns_argument.size() ? info.returns_argument[r] : -1;
    value = source >= 0 ? originals[source] : with_tensors(value, [&](const at::Tensor& t) { return beside(operands.distributed, t); });
  }
}

// out= forms that are taken apart into views of `out`: the functional form, and a copy.
void out_form(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto begin = stack->size() - op.schema().arguments().size();
  const Operands operands(c10::ArrayRef<c10::IValue>(*stack).slice(begin));
  if (!operands.distributed.defined()) return op.redispatchBoxed(below(keys), stack);
  run_out_form(info_of(op), *stack, begin);
}

// The bound of randint_like as a tensor, of which libtorch asks that it lies on the CPU: as a number.
void randint_like_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  const Operands operands(c10::ArrayRef<c10::IValue>(*stack).slice(begin));
  auto& high = (*stack)[begin + *schema.argumentIndexWithName("high")];
  if (!operands.distributed.defined() || high.toTensor().numel() != 1) return op.redispatchBoxed(below(keys), stack);
  high = numbers(high.toTensor())[0];
  const auto& overload = schema.overload_name();  // "Tensor", "Tensor_out", ...
  const auto of_number = overload == "Tensor" ? std::string() : overload.substr(std::string("Tensor_").size());
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::randint_like", of_number.c_str()).callBoxed(stack);
}

// Of libtorch 1.13, where no gradients are needed: its kernel is one with its mathematics, which have rules.
void attention_by_math(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto begin = stack->size() - op.schema().arguments().size();
  const Operands operands(c10::ArrayRef<c10::IValue>(*stack).slice(begin));
  if (!operands.distributed.defined()) return op.redispatchBoxed(below(keys), stack);
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::_scaled_dot_product_attention_math", "").callBoxed(stack);
}

// The rank's hook, or libtorch's own.
void attention_by_hook(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto& hook = World::current().local<AttentionHook>();
  if (!hook.compute) return op.redispatchBoxed(below(keys), stack);
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  const auto argument = [&](const char* name) {
    const auto index = schema.argumentIndexWithName(name);
    return index ? (*stack)[begin + *index] : c10::IValue();
  };
  AttentionArguments arguments{argument("query").toTensor(), argument("key").toTensor(), argument("value").toTensor()};
  if (const auto mask = argument("attn_mask"); mask.isTensor()) arguments.mask = mask.toTensor();
  if (const auto scale = argument("scale"); scale.isDouble()) arguments.scale = scale.toDouble();
  if (const auto weights = argument("need_attn_weights"); weights.isBool()) arguments.asks_for_weights = weights.toBool();
  arguments.dropout = argument("dropout_p").toDouble();
  arguments.causal = argument("is_causal").toBool();
  const auto result = hook.compute(arguments);
  if (!result) return op.redispatchBoxed(below(keys), stack);
  stack->resize(begin);
  stack->emplace_back(*result);
  if (schema.returns().size() > 1) stack->emplace_back(at::Tensor());  // the weights
}

// A product, which the rank's hook may refuse.
at::Tensor bmm(c10::DispatchKeySet keys, const at::Tensor& a, const at::Tensor& b) {
  const auto& hook = World::current().local<AttentionHook>();
  if (hook.check_product) hook.check_product(a, b);
  return at::_ops::bmm::redispatch(below(keys), a, b);
}

// As libtorch has them, which asks is_conj(). No DTensor says so: the copy of a conjugated view is known by its memory. What autograd
// records has to be right for plain gradients too.
template <int64_t which>
at::Tensor part_of_complex(const at::Tensor& self) {
  auto& impl = *as_dtensor(self);
  const bool has_values = impl.values() == Values::ready || impl.values() == Values::pending;
  const bool conjugated = has_values && sign_of(impl.local()).conjugated;
  const auto part = at::select(at::view_as_real(conjugated ? at::_conj(self) : self), self.dim(), which);
  return conjugated && which == 1 ? at::_neg_view(part) : part;
}

at::Tensor real(c10::DispatchKeySet keys, const at::Tensor& self) {
  return is_dtensor(self) && self.is_complex() ? part_of_complex<0>(self) : at::_ops::real::redispatch(below(keys), self);
}

at::Tensor imag(c10::DispatchKeySet keys, const at::Tensor& self) {
  return is_dtensor(self) && self.is_complex() ? part_of_complex<1>(self) : at::_ops::imag::redispatch(below(keys), self);
}

constexpr const char* kAttention[] = {"scaled_dot_product_attention", "_scaled_dot_product_attention"};
constexpr const char* kByMath[] = {"_scaled_dot_product_attention_forward"};
constexpr const char* kBelow[] = {"randint_like.Tensor", "randint_like.Tensor_generator", "randint_like.Tensor_out",
                                  "randint_like.Tensor_generator_out"};
constexpr const char* kOnWholeOperands[] = {"_grid_sampler_2d_cpu_fallback_backward",
                                            "_saturate_weight_to_fp16",
                                            "_shape_as_tensor",
                                            "_sobol_engine_draw",
                                            "_sobol_engine_ff_",
                                            "choose_qparams_optimized",
                                            "conv_tbc_backward",
                                            "linalg_eigvals.out",
                                            "linalg_matrix_rank.tol_tensor"};
constexpr const char* kOutForms[] = {"kron.out",
                                     "linalg_matmul.out",
                                     "linalg_matrix_power.out",
                                     "linalg_matrix_rank.out_tol_tensor",
                                     "matmul.out",
                                     "matrix_power.out",
                                     "nanmean.out",
                                     "nanquantile.scalar_out",
                                     "quantile.scalar_out"};

void register_boxed(torch::Library& library, c10::ArrayRef<const char*> names, torch::CppFunction (*kernel)()) {
  for (const std::string name : names) {
    const auto dot = std::min(name.find('.'), name.size());
    const auto overload = dot < name.size() ? name.substr(dot + 1) : std::string();
    if (c10::Dispatcher::singleton().findSchema({"aten::" + name.substr(0, dot), overload})) library.impl(name.c_str(), kernel());
  }
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  library.impl("max_pool1d", TORCH_FN(max_pool1d));
  library.impl("fill_diagonal_", TORCH_FN(fill_diagonal_));
  library.impl("bmm", TORCH_FN(bmm));
  library.impl("real", TORCH_FN(real));
  library.impl("imag", TORCH_FN(imag));
  library.impl("ctc_loss.IntList", TORCH_FN(ctc_loss));
  library.impl("ctc_loss.Tensor", TORCH_FN(ctc_loss_of_lengths));
  register_boxed(library, kAttention, [] { return torch::CppFunction::makeFromBoxedFunction<&attention_by_hook>(); });
  register_boxed(library, kByMath, [] { return torch::CppFunction::makeFromBoxedFunction<&attention_by_math>(); });
  register_boxed(library, kBelow, [] { return torch::CppFunction::makeFromBoxedFunction<&randint_like_below>(); });
  register_boxed(library, kOnWholeOperands, [] { return torch::CppFunction::makeFromBoxedFunction<&on_whole_operands>(); });
  register_boxed(library, kOutForms, [] { return torch::CppFunction::makeFromBoxedFunction<&out_form>(); });
}

}  // namespace

}  // namespace dtensor::dispatch
