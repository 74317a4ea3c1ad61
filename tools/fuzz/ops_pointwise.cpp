// Elementwise operators. Functions that grow, or have poles, are made tame by what they are composed with.
#include "sketch.hpp"

#include <torch/version.h>

namespace dtensor::fuzz {

namespace {

const Tame kink = apart_from({0});

Tame apart_from_whole_numbers() {
  return [](const Tensors& in, const std::vector<bool>& exact, const Ints&) {
    return exact[0] || (away_from(in[0] - in[0].detach().round(), 0) && away_from((in[0] - in[0].detach().floor()), 0.5));
  };
}

bool finite(const Tensors& in, const std::vector<bool>&, const Ints&) { return in[0].isfinite().all().item<bool>(); }

// A conversion of an infinity to whole numbers is undefined.
bool all_finite(const Tensors& in, const std::vector<bool>& exact, const Ints& args) {
  return all_exact(in, exact, args) && finite(in, exact, args);
}

Op where(std::string name, std::function<at::Tensor(T, T, T)> run) {
  return {std::move(name), keeps,
          [](Sketch& sketch, Step& step) {
            if (!two(number)(sketch, step)) return false;
            const auto a = sketch.at(step.in[0]), b = sketch.at(step.in[1]);
            const auto& longer = a.dim() >= b.dim() ? a : b;
            step.in.insert(step.in.begin(), sketch.of_sizes(longer.sizes().vec(), at::empty({0}, at::kBool)));
            return true;
          },
          [=](const Tensors& in, const Ints&) { return Tensors{run(in[0], in[1], in[2])}; }};
}

Op to_dtype(at::ScalarType dtype, Accepts accepts, Tame tame) {
  return unary(std::string("to ") + c10::toString(dtype), keeps, [=](T x) { return x.to(dtype); }, std::move(tame), std::move(accepts));
}

void add_unary(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      unary("tanh", rounds, [](T x) { return x.tanh(); }),
      unary("sigmoid", rounds, [](T x) { return x.sigmoid(); }),
      unary("sin", rounds, [](T x) { return x.sin(); }),
      unary("exp(-x*x)", rounds, [](T x) { return (-x * x).exp(); }),
      unary("exp", rounds, [](T x) { return x.exp(); }),
#if TORCH_VERSION_MAJOR >= 2  // of infinities its two kernels, one of them for contiguous memory, make inf and NaN
      unary("gelu", rounds, [](T x) { return at::gelu(x); }, finite),
#else  // its gradient reads past an incoming one that lies in another memory order: so that none does
      unary("gelu", rounds, [](T x) { return at::gelu(x.flatten()).view(x.sizes()); }),
#endif
      unary("silu", rounds, [](T x) { return at::silu(x); }),
      unary("softplus", rounds, [](T x) { return at::softplus(x); }),
      unary("erf", rounds, [](T x) { return x.erf(); }),
      unary("log1p(x*x)", rounds, [](T x) { return (x * x).log1p(); }),
      unary("sqrt(x*x+1)", rounds, [](T x) { return (x * x + 1).sqrt(); }),
      unary("rsqrt(x*x+1)", rounds, [](T x) { return (x * x + 1).rsqrt(); }),
      unary("reciprocal(x*x+1)", rounds, [](T x) { return (x * x + 1).reciprocal(); }),
      unary("x / 3", rounds, [](T x) { return x / 3; }),
      unary("x * 0.5", rounds, [](T x) { return x * 0.5; }),
      unary("x + 0.25", rounds, [](T x) { return x + 0.25; }),
      unary("elu", rounds, [](T x) { return at::elu(x); }),
      unary("leaky_relu", rounds, [](T x) { return at::leaky_relu(x, 0.1); }, kink),
      unary("hardtanh", keeps, [](T x) { return at::hardtanh(x, -2, 3); }, apart_from({-2, 3})),
      unary("threshold", keeps, [](T x) { return at::threshold(x, 1, -2); }, apart_from({1})),
      unary("neg", keeps, [](T x) { return x.neg(); }, {}, number),
      unary("abs", keeps, [](T x) { return x.abs(); }, kink, number),
      unary("relu", keeps, [](T x) { return x.relu(); }, kink, number),
      unary("square", keeps, [](T x) { return x.square(); }, {}, number),
      unary("pow 3", keeps, [](T x) { return x.pow(3); }, {}, number),
      unary("x + 3", keeps, [](T x) { return x + 3; }, {}, number),
      unary("2 * x", keeps, [](T x) { return 2 * x; }, {}, number),
      unary("x * 0", keeps, [](T x) { return x * 0; }, {}, number),
      unary("1 - x", keeps, [](T x) { return 1 - x; }, {}, number),
      unary("clamp", keeps, [](T x) { return x.clamp(-3, 4); }, apart_from({-3, 4}), number),
      unary("clamp_min", keeps, [](T x) { return x.clamp_min(-1); }, apart_from({-1}), number),
      unary("sign", keeps, [](T x) { return x.sign(); }, kink, number),
      unary("floor", keeps, [](T x) { return x.floor(); }, apart_from_whole_numbers()),
      unary("round", keeps, [](T x) { return x.round(); }, apart_from_whole_numbers()),
      unary("trunc", keeps, [](T x) { return x.trunc(); }, apart_from_whole_numbers()),
      unary("clone", keeps, [](T x) { return x.clone(); }, {}, any_tensor),
      unary("contiguous", keeps, [](T x) { return x.contiguous(); }, {}, any_tensor),
      unary("zeros_like", keeps, [](T x) { return at::zeros_like(x); }, {}, any_tensor),
      unary("ones_like", keeps, [](T x) { return at::ones_like(x); }, {}, any_tensor),
      unary("full_like", keeps, [](T x) { return at::full_like(x, 3); }, {}, number),
      unary("new_zeros", keeps, [](T x) { return x.new_zeros({2, 3}) + x.sum(); }, {}, number),
      unary("x > 1", keeps, [](T x) { return x > 1; }, apart_from({1}), number),
      unary("x == 2", keeps, [](T x) { return x == 2; }, apart_from({2}), number),
      unary("isfinite", keeps, [](T x) { return x.isfinite(); }, {}, number),
      unary("logical_not", keeps, [](T x) { return x.logical_not(); }, kink, any_tensor),
      unary("nan_to_num", keeps, [](T x) { return x.nan_to_num(); }),
      unary("remainder", keeps, [](T x) { return x.remainder(3); }, all_exact, number),
      unary("floor_divide", keeps, [](T x) { return x.floor_divide(2); }, {}, integral),
      unary("x << 1", keeps, [](T x) { return x.bitwise_left_shift(1); }, {}, integral),
  });
}

}  // namespace

void add_pointwise(std::vector<Op>& ops) {
  add_unary(ops);
  ops.insert(ops.end(), {
      binary("add", keeps, [](T a, T b) { return a + b; }),
      binary("add alpha", keeps, [](T a, T b) { return a.add(b, 2); }),
      binary("sub", keeps, [](T a, T b) { return a - b; }),
      binary("rsub", keeps, [](T a, T b) { return at::rsub(a, b); }),
      binary("mul", keeps, [](T a, T b) { return a * b; }),
      binary("a / (b*b+1)", rounds, [](T a, T b) { return a / (b * b + 1); }),
      binary("lerp", rounds, [](T a, T b) { return a.lerp(b, 0.3); }, {}, floating),
      binary("atan2", rounds, [](T a, T b) { return a.atan2(b * b + 1); }, {}, floating),
      binary("hypot", rounds, [](T a, T b) { return at::hypot(a, b * b + 1); }, {}, floating),
      binary("maximum", keeps, [](T a, T b) { return at::maximum(a, b); }, operands_apart),
      binary("minimum", keeps, [](T a, T b) { return at::minimum(a, b); }, operands_apart),
      binary("lt", keeps, [](T a, T b) { return a < b; }, operands_apart),
      binary("eq", keeps, [](T a, T b) { return a == b; }, operands_apart),
      binary("ge", keeps, [](T a, T b) { return a >= b; }, operands_apart),
      binary("bitwise_and", keeps, [](T a, T b) { return a & b; }, {}, integral),
      binary("logical_and", keeps, [](T a, T b) { return a.logical_and(b); }, {}, boolean),
      binary("logical_or", keeps, [](T a, T b) { return a | b; }, {}, boolean),
      binary("logical_xor", keeps, [](T a, T b) { return a ^ b; }, {}, boolean),
      binary("type_as", keeps, [](T a, T b) { return a.type_as(b); }, {}, floating),
      where("where", [](T m, T a, T b) { return at::where(m, a, b); }),
      where("masked_fill", [](T m, T a, T) { return a.masked_fill(m, 2); }),
      where("where number", [](T m, T a, T) { return at::where(m, a, 1); }),
      {"addcmul", keeps, three(floating), [](const Tensors& in, const Ints&) { return Tensors{in[0].addcmul(in[1], in[2], 2)}; }},
      {"addcdiv", rounds, three(floating), [](const Tensors& in, const Ints&) { return Tensors{in[0].addcdiv(in[1], in[2] * in[2] + 1)}; }},
      {"lerp tensor", rounds, three(floating), [](const Tensors& in, const Ints&) { return Tensors{in[0].lerp(in[1], in[2].sigmoid())}; }},
      to_dtype(at::kDouble, any_tensor, {}),
      to_dtype(at::kFloat, any_tensor, {}),
      to_dtype(at::kLong, number, all_finite),
      to_dtype(at::kInt, number, all_finite),
      to_dtype(at::kBool, number, kink),
  });
}

}  // namespace dtensor::fuzz
