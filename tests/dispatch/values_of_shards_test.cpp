// Pending sums and extremes beside infinities: what is done to the parts gives one device's numbers, never a NaN of its own.
#include "tests/support/op_check.hpp"

#include <range/v3/action/push_back.hpp>
#include <torch/version.h>

#include <limits>
#include <sstream>

using namespace dtensor;
using namespace dtensor::test;

namespace {

const float kInf = std::numeric_limits<float>::infinity();

// Kernels of libtorch 2.x compute eight elements of some functions at once otherwise than the rest (sine), so that a shard's last bit may
// differ.
constexpr double kRoundingOfFunctions = TORCH_VERSION_MAJOR >= 2 ? 1e-6 : 0;

// Equal, also infinities and NaN.
bool same_with_nan(const at::Tensor& got, const at::Tensor& expected, double rounding) {
  return got.sizes() == expected.sizes() && at::allclose(got.to(at::kDouble), expected.to(at::kDouble), rounding, 0, /*equal_nan=*/true);
}

using NamedFunctions = std::vector<std::pair<std::string, Function>>;

// Each function of operands that lie so gives one device's numbers, also infinities and NaN.
void check_values(const NamedFunctions& functions, const Tensors& plain, const DeviceMesh& mesh, const Tensors& placed,
                  const std::string& where) {
  Spmd spmd(mesh);
  for (const auto& [name, run] : functions) {
    Tensors expected;
    {
      NoSpmd none;
      expected = run(plain);
    }
    const auto got = run(placed);
    for (size_t i = 0; i < got.size(); ++i) {
      const auto whole = full_tensor(got[i]);
      std::ostringstream text;
      text << whole << "\nexpected\n" << expected[i];
      require(same_with_nan(whole, expected[i], name == "functions" ? kRoundingOfFunctions : 0), "test", "{} of {} is\n{}", name, where,
              text.str());
    }
  }
}

// Of a pending maximum (in[0]), a pending minimum (in[1]), and a whole operand (in[2]).
const NamedFunctions kOfExtremes{
    {"max - min",
     [](const Tensors& in) {
       return Tensors{in[0] - in[1], in[1] - in[0], in[0] + in[1], in[0] - in[0], in[0] * in[1]};
     }},
    {"max + operand",
     [](const Tensors& in) {
       return Tensors{in[0] + in[2], in[2] + in[0], in[1] + in[2], in[2] - in[1]};
     }},
    {"max + number",
     [](const Tensors& in) {
       return Tensors{in[0] + kInf, in[0] - kInf, in[1] - kInf, in[0] + 1, in[1].add(2, kInf)};
     }},
    {"max + number in place",
     [](const Tensors& in) {
       return Tensors{in[0].clone().add_(kInf), in[1].clone().sub_(kInf), in[0].clone().add_(1)};
     }},
    {"addcmul",
     [](const Tensors& in) {
       return Tensors{in[0].addcmul(in[2], in[2]), in[1].addcdiv(in[2], in[2], -1)};
     }},
    {"_foreach_add",
     [](const Tensors& in) {
       return at::_foreach_add({in[0], in[1]}, {in[2], in[2]});
     }},
    {"_foreach_add number",
     [](const Tensors& in) {
       return at::_foreach_add({in[0], in[1]}, kInf);
     }},
    {"functions",
     [](const Tensors& in) {
       Tensors results;
       for (const auto& x : {in[0], in[1]}) {
         for (const auto& y : {x.relu(),
                               at::relu6(x),
                               x.exp(),
                               x.exp2(),
                               x.expm1(),
                               x.sigmoid(),
                               x.tanh(),
                               x.ceil(),
                               x.floor(),
                               x.round(),
                               x.trunc(),
                               x.erf(),
                               x.atan(),
                               x.sinh(),
                               x.asinh(),
                               at::hardtanh(x),
                               x.clamp(-1, 2),
                               x.clamp_min(0),
                               x.clamp_max(0),
                               at::hardsigmoid(x),
                               at::hardshrink(x),
                               at::special_log_ndtr(x),
                               at::special_ndtr(x),
                               x.erfc(),
                               at::special_erfcx(x),
                               x.neg(),
                               x.rad2deg(),
                               x.deg2rad(),
                               x.log(),
                               x.log2(),
                               x.log10(),
                               x.log1p(),
                               x.sqrt(),
                               x.acosh(),
                               x.rsqrt(),
                               x.clamp_min(in[2]),
                               x.clamp(in[2], in[2] + 1),
                               at::logaddexp(x, in[2]),
                               at::logaddexp2(in[2], x),
                               at::maximum(x, in[2]),
                               at::minimum(in[2], x),
                               x.reciprocal(),
                               x.square(),
                               x.abs(),
                               x.sin(),
                               x.pow(2),
                               at::elu(x),
                               at::silu(x),
                               at::softplus(x),
                               x.masked_fill(in[2].gt(0), -kInf),
                               torch::where(in[2].gt(0), x, in[2]),
                               x.isinf(),
                               x.sign()})
           results.push_back(y);
       }
       return results;
     }},
    {"reductions",
     [](const Tensors& in) { return Tensors{in[0].amax(), in[1].amin(), in[0].sum(), in[1].mean(), in[0].amin(), in[0].log_softmax(0)}; }}};

}  // namespace

TEST_CASE("ops: the maximum of a part without elements is never NaN", "[ops][pending]") {
  const auto x = torch::tensor({{kInf, 1.f, -kInf, -kInf, 3.f, 0.f, -2.f}, {-kInf, -kInf, -kInf, 2.f, kInf, -1.f, 5.f}});
  const auto other = torch::tensor({kInf, -kInf, kInf, 1.f, -kInf, 0.f, 2.f});
  for (const auto* transport : {"threads", "gloo"}) {
    for (const int64_t ranks : {2, 3, 4}) {
      CHECK_NOTHROW(on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        for (const auto& p : {shard(0), replicate(), shard(1)}) {
          const auto lies = distribute_tensor(x, mesh, {p}).tensor();
          const auto whole = distribute_tensor(other, mesh, {replicate()}).tensor();
          check_values(kOfExtremes, {x.amax(0), x.amin(0), other}, mesh, {lies.amax(0), lies.amin(0), whole}, "extremes over " + p.str());
        }
      }, transport));
    }
  }
}

namespace {

// Of a pending sum (in[0], [2, 3]), whole operands of its shape with infinities and zeros (in[1]) and of whole numbers (in[2]).
const NamedFunctions kOfSums{
    {"mul",
     [](const Tensors& in) {
       return Tensors{in[0] * in[1], in[1] * in[0], in[0].clone().mul_(in[1]), in[0] * in[2], in[0] * in[2].gt(0)};
     }},
    {"div",
     [](const Tensors& in) {
       return Tensors{in[0] / in[1], in[0] / in[2], in[0].clone().div_(in[1]), in[0].div(in[1], "trunc")};
     }},
    {"numbers",
     [](const Tensors& in) {
       return Tensors{in[0] * kInf,     in[0] / kInf,     in[0] * 0.0,      in[0] / 0.0,          in[0] / 0,   in[0] * -kInf,
                      in[0] * 1e-310,   in[0] * 2,        in[0] / 4,        in[0].add(in[0], kInf), in[0] + kInf, kInf - in[0],
                      torch::rsub(in[0], in[1]), in[0].lerp(in[0], kInf), in[0].clone().mul_(kInf), in[0].clone().div_(0.0)};
     }},
    {"numbers again",
     [](const Tensors& in) {
       return Tensors{in[0] * 0.5, in[0] * 1.5, in[0] * kInf, in[0] / 2.0, in[0] / 0.0};
     }},
    {"addcmul",
     [](const Tensors& in) {
       return Tensors{in[1].addcmul(in[0], in[1]), in[0].addcdiv(in[0], in[1]), in[0].lerp(in[0] * 2, in[1])};
     }},
    {"_foreach",
     [](const Tensors& in) {
       const Tensors sums{in[0], in[0]}, values{in[1], in[1]};
       const std::vector<at::Scalar> numbers{kInf, 2.0}, divisors{2.0, 0.0};
       auto results = at::_foreach_mul(sums, values);
       for (const auto& more :
            std::vector<Tensors>{at::_foreach_div(sums, values), at::_foreach_div(sums, 0.0), at::_foreach_addcmul(sums, sums, values, 1),
                                 at::_foreach_mul(sums, 3.0), at::_foreach_mul(sums, numbers), at::_foreach_div(sums, divisors)}) {
         ranges::push_back(results, more);
       }
       return results;
     }},
    {"products",
     [](const Tensors& in) {
       const auto a = in[0], b = in[1];
       return Tensors{a.mm(b.t()),
                      b.mm(a.t()),
                      at::addmm(torch::ones({2, 2}), a, b.t(), kInf),
                      at::addmm(torch::ones({2, 2}), a, b.t(), 1, kInf),
                      a[0].dot(b[0]),
                      a.mv(b[1]),
                      a[0].outer(b[0]),
                      a.view({1, 2, 3}).bmm(b.t().view({1, 3, 2})),
                      at::conv1d(a.view({1, 2, 3}), b.view({1, 2, 3})),
                      at::linalg_cross(a, b, 1)};
     }},
    {"gradients",
     [](const Tensors& in) {
       const auto g = in[0], x = in[1];
       return Tensors{at::threshold_backward(g, x, 0),
                      at::gelu_backward(g, x),
                      at::silu_backward(g, x),
                      at::hardtanh_backward(g, x, -1, 1),
                      at::hardswish_backward(g, x),
                      at::hardsigmoid_backward(g, x),
                      at::softplus_backward(g, x, 1, 20),
                      at::softshrink_backward(g, x, 0.5),
                      at::hardshrink_backward(g, x, 0.5),
                      at::leaky_relu_backward(g, x, 0.1, false),
                      at::leaky_relu_backward(g, x, kInf, false),
                      at::elu_backward(g, 1, 1, 1, false, x),
                      at::mish_backward(g, x),
                      at::sigmoid_backward(g, x.sigmoid()),
                      at::tanh_backward(g, x.tanh()),
                      at::native_dropout_backward(g, in[2].gt(0), 2),
                      at::native_dropout_backward(g, in[2].gt(0), kInf),
                      at::_softmax_backward_data(g, in[2].softmax(1, g.scalar_type()), 1, g.scalar_type())};
     }},
    {"half",
     [](const Tensors& in) {
       return Tensors{(in[0] * 1e5).to(at::kHalf), (in[0] * 1e5).sum(at::kHalf)};
     }},
    {"moves", [](const Tensors& in) {
       return Tensors{in[0].t(),
                      in[0].sum(0),
                      in[0].cumsum(1),
                      torch::where(in[2].gt(0), in[0], in[0] * 2),
                      in[0].masked_fill(in[2].gt(0), kInf),
                      torch::cat({in[0], in[1]}),
                      in[0] + in[1],
                      in[1] - in[0]};
     }}};

}  // namespace

TEST_CASE("ops: a pending sum is never multiplied by infinity in parts", "[ops][pending]") {
  const auto whole = torch::tensor({{1.f, -1.f, 0.f}, {2.f, 0.f, -3.f}});
  const auto factors = torch::tensor({{kInf, -kInf, 0.f}, {1.f, kInf, 2.f}}), numbers = torch::tensor({{1, 0, 2}, {0, -1, 3}});
  for (const auto* transport : {"threads", "gloo"}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}}) {
      CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) {
        const Placements replicated(mesh.ndim(), replicate());
        const auto put = [&](const at::Tensor& x, const Placements& placements) {
          return redistribute(distribute_tensor(x, mesh, replicated).tensor(), placements);
        };
        for (const auto op : {ReduceOp::sum, ReduceOp::avg}) {
          auto placements = replicated;
          placements.back() = partial(op);
          const Tensors plain{whole, factors, numbers}, others{put(factors, replicated), put(numbers, replicated)};
          check_values(kOfSums, plain, mesh, {put(whole, placements), others[0], others[1]}, str(placements) + " of zeros");
          if (op == ReduceOp::avg) continue;  // equal parts
          check_values(kOfSums, plain, mesh, {placed(whole, mesh, placements), others[0], others[1]},
                       str(placements) + " of unequal parts");
        }
      }, transport));
    }
  }
}

TEST_CASE("ops: what scales a pending sum in training moves nothing", "[ops][pending]") {
  const auto g = whole_numbers({4, 6}), x = fractions({4, 6});
  const std::vector<Placements> lies{{partial()}, {replicate()}};
  const std::string sum = "(P(sum))";
  check_free({"numbers",
              {g},
              [](const Tensors& in) {
                return Tensors{in[0] * 65536.0, in[0] / 4, in[0].neg(), in[0] * 2 + in[0], in[0].to(at::kDouble)};
              },
              0},
             {2}, {lies[0]}, std::vector<std::string>(5, sum));
  check_free({"masks",
              {g, x},
              [](const Tensors& in) {
                return Tensors{in[0] * in[1].gt(0), at::native_dropout_backward(in[0], in[1].gt(0), 2)};
              }},
             {2}, lies, {sum, sum});
  check_free({"slopes",
              {g, x},
              [](const Tensors& in) {
                return Tensors{at::threshold_backward(in[0], in[1], 0), at::gelu_backward(in[0], in[1]), at::silu_backward(in[0], in[1]),
                               at::tanh_backward(in[0], in[1].tanh())};
              },
              1e-5},
             {2}, lies, std::vector<std::string>(4, sum));
  check_free({"a residual",
              {g, x},
              [](const Tensors& in) {
                return Tensors{in[0] + in[1], in[0].view({24}), in[0].sum(0)};
              },
              1e-6},
             {2}, lies, {sum, sum, sum});
}
