// The operator of rotary_embedding.hpp on the CPU: dtensor::rotary, its gradient and its sharding rule.
#include <dtensor/nn/rotary_embedding.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/custom_op.hpp>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <mutex>
#include <vector>

// A product and a sum round by themselves, so an element has the same bits wherever it lies.
#pragma GCC optimize("O3", "fp-contract=off")

namespace dtensor::nn {

namespace {

// Turns a head's pairs by angles with these cosines and sines; by the negative ones where `sign` is -1.
template <class S, class T>
void turn(const S* x, const T* cos, const T* sin, T sign, int64_t pairs, S* y) {
  for (int64_t i = 0; i < pairs; ++i) {
    const T a = static_cast<T>(x[2 * i]), b = static_cast<T>(x[2 * i + 1]), s = sign * sin[i];
    y[2 * i] = static_cast<S>(a * cos[i] - b * s);
    y[2 * i + 1] = static_cast<S>(a * s + b * cos[i]);
  }
}

template <class S, class T>
void turn_all(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, T sign, const at::Tensor& y) {
  const auto batch = x.size(0), length = x.size(1), heads = x.size(2), dim = x.size(3), pairs = dim / 2;
  const auto *from = x.data_ptr<S>();
  const auto *c = cos.data_ptr<T>(), *s = sin.data_ptr<T>();
  auto* const to = y.data_ptr<S>();
  const auto grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, heads * dim));
  at::parallel_for(0, batch * length, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto position = row % length;
      const auto* const of_row = from + row / length * x.stride(0) + position * x.stride(1);
      for (int64_t head = 0; head < heads; ++head)
        turn(of_row + head * x.stride(2), c + position * pairs, s + position * pairs, sign, pairs, to + (row * heads + head) * dim);
    }
  });
}

void check(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  require(x.dim() == 4 && x.size(3) % 2 == 0 && cos.dim() == 2 && cos.size(0) == x.size(1) && cos.size(1) == x.size(3) / 2 &&
              cos.sizes() == sin.sizes(),
          "rotary", "got x [{}], cosines [{}] and sines [{}]; expected [batch, length, heads, dim] and twice [length, dim / 2]",
          fmt::join(x.sizes(), ", "), fmt::join(cos.sizes(), ", "), fmt::join(sin.sizes(), ", "));
}

at::Tensor rotary_cpu(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  check(x, cos, sin);
  const auto from = x.stride(3) == 1 ? x : x.contiguous();
  const auto y = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x.scalar_type(), "rotary", [&] {
    using T = at::opmath_type<scalar_t>;
    const auto dtype = c10::CppTypeToScalarType<T>::value;
    const auto of_dtype = [&](const at::Tensor& table) { return (table.scalar_type() == dtype ? table : table.to(dtype)).contiguous(); };
    turn_all<scalar_t, T>(from, of_dtype(cos), of_dtype(sin), back ? -1 : 1, y);
  });
  return y;
}

at::Tensor rotary_meta(const at::Tensor& x, const at::Tensor&, const at::Tensor&, bool) { return at::empty(x.sizes(), x.options()); }

at::Tensor call_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("dtensor::rotary", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>();
  return op.call(x, cos, sin, back);
}

// The inverse of a turn is its transpose.
class Rotary : public torch::autograd::Function<Rotary> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                            bool back) {
    context->save_for_backward({cos, sin});
    context->saved_data["back"] = back;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_rotary(x, cos, sin, back);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {call_rotary(gradients[0], saved[0], saved[1], !context->saved_data["back"].toBool()), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor rotary_autograd(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  if (at::GradMode::is_enabled() && x.requires_grad()) return Rotary::apply(x, cos, sin, back);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_rotary(x, cos, sin, back);
}

TORCH_LIBRARY_FRAGMENT(dtensor, library) { library.def("rotary(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor"); }
TORCH_LIBRARY_IMPL(dtensor, CPU, library) { library.impl("rotary", rotary_cpu); }
TORCH_LIBRARY_IMPL(dtensor, Meta, library) { library.impl("rotary", rotary_meta); }
TORCH_LIBRARY_IMPL(dtensor, Autograd, library) { library.impl("rotary", rotary_autograd); }

// The tables of a rank, each as long as it was needed.
class KeptTables {
 public:
  RotaryTable at_least(int64_t length, int64_t dim, const RotaryOptions& options, c10::ScalarType dtype) {
    const std::lock_guard lock(mutex_);
    const auto fits = [&](const Kept& one) { return one.dim == dim && one.dtype == dtype && one.options == options; };
    auto kept = std::ranges::find_if(kept_, fits);
    if (kept == kept_.end()) kept = kept_.insert(kept, {dim, options, dtype, {}});
    if (!kept->table.cos.defined() || kept->table.cos.size(0) < length) {
      const c10::InferenceMode trainable(false);
      const auto longer = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(length)));
      kept->table = detail::table_of(at::arange(longer, at::kLong), dim, options, dtype);
    }
    return kept->table;
  }

 private:
  struct Kept {
    int64_t dim;
    RotaryOptions options;
    c10::ScalarType dtype;
    RotaryTable table;
  };
  std::mutex mutex_;
  std::vector<Kept> kept_;
};

}  // namespace

RotaryTable detail::kept_table(const at::Tensor& positions, int64_t dim, const RotaryOptions& options, c10::ScalarType dtype) {
  const auto* mesh = Spmd::current();
  const auto own = is_dtensor(positions) ? DTensor(positions).to_local() : positions;
  RotaryTable rows;
  {
    const NoSpmd plain;
    auto& kept = (mesh ? mesh->world() : World::current()).local<KeptTables>();
    const auto length = own.numel() == 0 ? 0 : own.max().item<int64_t>() + 1;
    const auto table = kept.at_least(length, dim, options, dtype);
    rows = {table.cos.index_select(0, own), table.sin.index_select(0, own)};
  }
  if (!mesh) return rows;
  const Placements replicated(mesh->ndim(), replicate());
  const auto whole = [&](const at::Tensor& all) { return from_local(all, *mesh, replicated, all.sizes()); };
  return {whole(rows.cos), whole(rows.sin)};
}

at::Tensor detail::turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  [[maybe_unused]] static const bool has_rule = [] {
    register_rule("dtensor::rotary", "blhd,lc,lc->blhd", {.whole = "dc"});
    return true;
  }();
  check(x, cos, sin);  // of whole tensors, before ranks take their shards
  return call_rotary(x, cos, sin, false);
}

}  // namespace dtensor::nn
