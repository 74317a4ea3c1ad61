// Products of rows whose bits do not depend on how many rows there are: the operator dtensor::rows_product, its gradient, its sharding
// rule, and what takes libtorch's linear layers and activations to it inside of BatchInvariant.
#include <dtensor/generate/batch_invariant.hpp>

#include <dtensor/tensor/custom_op.hpp>

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace dtensor::generate {

namespace {

#define DTENSOR_KERNEL "src/generate/rows_product_kernel.inl"
#include <dtensor/base/vectors/instruction_sets.inl>

template <class S, class T>
void multiply(const S* x, int64_t rows, const S* w, int64_t outputs, int64_t k, T* y, int64_t y_stride) {
  DTENSOR_BEST(multiply, x, rows, w, outputs, k, y, y_stride);
}

// y of sums, float32 or float64.
template <class S, class T>
void multiply_in_parts(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  const auto outputs = w.size(0), k = w.size(1), rows = outputs > 0 ? y.numel() / outputs : 0;
  const auto* from = static_cast<const S*>(x.data_ptr());
  const auto* weights = static_cast<const S*>(w.data_ptr());
  auto* const to = y.data_ptr<T>();
  const auto grain = std::max<int64_t>(4, 32768 / std::max<int64_t>(1, rows * k));
  at::parallel_for(0, outputs, (grain + 3) / 4 * 4, [&](int64_t begin, int64_t end) {
    multiply<S, T>(from, rows, weights + begin * k, end - begin, k, to + begin, outputs);
  });
}

// x [..., k] and w [outputs, k] of one dtype -> [..., outputs].
at::Tensor product(const at::Tensor& x, const at::Tensor& w) {
  const auto rows = x.contiguous(), weights = w.contiguous();
  const auto sums = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto sizes = c10::SmallVector<int64_t, 4>(x.sizes());
  sizes.back() = w.size(0);
  const auto y = at::empty(sizes, x.options().dtype(sums));
  switch (x.scalar_type()) {
    case at::kFloat: multiply_in_parts<float, float>(rows, weights, y); break;
    case at::kDouble: multiply_in_parts<double, double>(rows, weights, y); break;
    case at::kBFloat16: multiply_in_parts<uint16_t, float>(rows, weights, y); break;
    default: fail("rows_product", "computes float32, bfloat16 and float64; got {}", c10::toString(x.scalar_type()));
  }
  return sums == x.scalar_type() ? y : y.to(x.scalar_type());
}

at::Tensor rows_product_cpu(const at::Tensor& x, const at::Tensor& w) {
  const bool fits = x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type();
  if (!fits) {
    fail("rows_product", "got x of {} dims, w of {} dims, of {} and {}; expected [rows, k] and [outputs, k] of one dtype", x.dim(), w.dim(),
         c10::toString(x.scalar_type()), c10::toString(w.scalar_type()));
  }
  return product(x, w);
}

at::Tensor rows_product_meta(const at::Tensor& x, const at::Tensor& w) { return at::empty({x.size(0), w.size(0)}, x.options()); }

at::Tensor call_rows_product(const at::Tensor& x, const at::Tensor& w) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("dtensor::rows_product", "").typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, w);
}

thread_local bool products_only = false;  // of this thread's innermost InvariantRows

// Above autograd, for extensions of libtorch, which itself does not use it.
constexpr auto kKey = c10::DispatchKey::DeferredInit;

class RowsProduct : public torch::autograd::Function<RowsProduct> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_rows_product(x, w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const c10::impl::ExcludeDispatchKeyGuard below(kKey);  // gradients are no rows of a batch
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0])};
  }
};

bool needs_gradient(const at::Tensor& x, const at::Tensor& w) {
  return at::GradMode::is_enabled() && (x.requires_grad() || w.requires_grad());
}

at::Tensor rows_product_autograd(const at::Tensor& x, const at::Tensor& w) {
  if (needs_gradient(x, w)) return RowsProduct::apply(x, w);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_rows_product(x, w);
}

// -- What libtorch's operators become inside of BatchInvariant ---------------------------------------------------------------

bool computes(const at::Tensor& x) {
  return x.device().is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble || x.scalar_type() == at::kBFloat16);
}

// Whether x [..., k] times w^T is a product of rows.
bool multiplies_rows(const at::Tensor& x, const at::Tensor& w) {
  return computes(x) && x.dim() >= 2 && w.dim() == 2 && x.scalar_type() == w.scalar_type();
}

// Whether the kernel reads w, or the transpose of y, where it lies. Copying it first costs more than is gained.
bool lies_well(const at::Tensor& w) { return !products_only || w.is_contiguous(); }
bool transpose_lies_well(const at::Tensor& y) { return !products_only || (y.stride(0) == 1 && y.stride(1) == y.size(0)); }

at::Tensor rows_of(const at::Tensor& x, const at::Tensor& w) {
  const bool is_plain = !is_dtensor(x) && !is_dtensor(w) && x.has_storage() && w.has_storage();
  if (is_plain && !needs_gradient(x, w) && x.size(-1) == w.size(1)) return product(x, w);  // without the dispatcher
  auto sizes = x.sizes().vec();
  const auto y = rows_product(x.dim() == 2 ? x : x.flatten(0, -2), w);
  sizes.back() = w.size(0);
  return y.reshape(sizes);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const c10::optional<at::Tensor>& bias) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  if (!multiplies_rows(x, w) || !lies_well(w)) return at::linear(x, w, bias);
  const auto y = rows_of(x, w);
  return bias && bias->defined() ? y.add(*bias) : y;
}

// torch::nn::Linear of C++ calls these with a weight's transpose. Where the sizes do not fit, libtorch says so.
at::Tensor matmul(const at::Tensor& x, const at::Tensor& y) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const bool takes = multiplies_rows(x, y) && x.size(-1) == y.size(0) && transpose_lies_well(y);
  return takes ? rows_of(x, y.t()) : at::matmul(x, y);
}

at::Tensor mm(const at::Tensor& x, const at::Tensor& y) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const bool takes = multiplies_rows(x, y) && x.dim() == 2 && x.size(1) == y.size(0) && transpose_lies_well(y);
  return takes ? rows_of(x, y.t()) : at::mm(x, y);
}

at::Tensor addmm(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& y, const at::Scalar& beta, const at::Scalar& alpha) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const bool takes = multiplies_rows(x, y) && x.dim() == 2 && x.size(1) == y.size(0) && transpose_lies_well(y) &&
                     bias.scalar_type() == x.scalar_type() && beta.equal(1) && alpha.equal(1);
  return takes ? rows_of(x, y.t()).add(bias) : at::addmm(bias, x, y, beta, alpha);
}

// libtorch computes the last elements of a tensor by other instructions. So each row is made to end where a vector ends.
template <class F>
at::Tensor in_whole_vectors(const at::Tensor& x, const F& f) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const auto width = x.dim() > 0 ? x.size(-1) : 0, more = (64 - width % 64) % 64;
  if (products_only || !computes(x)) return f(x);
  if (more == 0) return f(x.contiguous());
  return f(at::constant_pad_nd(x, {0, more})).narrow(-1, 0, width);
}

template <at::Tensor (*F)(const at::Tensor&)>
at::Tensor whole_vectors_of(const at::Tensor& x) {
  return in_whole_vectors(x, [](const at::Tensor& y) { return F(y); });
}

at::Tensor gelu(const at::Tensor& x, c10::string_view approximate) {
  return in_whole_vectors(x, [&](const at::Tensor& y) { return at::gelu(y, approximate); });
}

TORCH_LIBRARY_FRAGMENT(dtensor, library) { library.def("rows_product(Tensor x, Tensor w) -> Tensor"); }
TORCH_LIBRARY_IMPL(dtensor, CPU, library) { library.impl("rows_product", rows_product_cpu); }
TORCH_LIBRARY_IMPL(dtensor, Meta, library) { library.impl("rows_product", rows_product_meta); }
TORCH_LIBRARY_IMPL(dtensor, Autograd, library) { library.impl("rows_product", rows_product_autograd); }

TORCH_LIBRARY_IMPL(_, DeferredInit, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  library.impl("linear", linear);
  library.impl("matmul", matmul);
  library.impl("mm", mm);
  library.impl("addmm", addmm);
  library.impl("silu", whole_vectors_of<at::silu>);
  library.impl("sigmoid", whole_vectors_of<at::sigmoid>);
  library.impl("tanh", whole_vectors_of<at::tanh>);
  library.impl("cos", whole_vectors_of<at::cos>);
  library.impl("sin", whole_vectors_of<at::sin>);
  library.impl("gelu", gelu);
}

}  // namespace

InvariantRows::InvariantRows(bool only) : before_(std::exchange(products_only, only)) {}
InvariantRows::~InvariantRows() { products_only = before_; }

at::Tensor rows_product(const at::Tensor& x, const at::Tensor& w) {
  [[maybe_unused]] static const bool has_rule = [] {
    register_rule("dtensor::rows_product", "mk,nk->mn");
    return true;
  }();
  return call_rows_product(x, w);
}

int64_t few_rows() { return has_avx512() ? 32 : has_avx2() ? 8 : 3; }

}  // namespace dtensor::generate
