// Reductions, softmax and sorting, under every placement.
#include "tests/support/op_check.hpp"
#include "tests/support/words_of.hpp"

#include <dtensor/base/compat.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

Function single(std::function<at::Tensor(const at::Tensor&)> f) {
  return [f = std::move(f)](const Tensors& in) { return Tensors{f(in[0])}; };
}

using Dims = std::vector<int64_t>;

}  // namespace

TEST_CASE("ops: reductions", "[ops][reduction]") {
  const auto x = whole_numbers({5, 3, 4});
  check({"sum", {x}, single([](auto& t) { return t.sum(); })});
  check({"sum dim", {x}, single([](auto& t) { return t.sum(Dims{0}); })});
  check({"sum dims keepdim", {x}, single([](auto& t) { return t.sum(Dims{0, -1}, true); })});
  check({"sum dtype", {x}, single([](auto& t) { return t.sum(Dims{1}, false, torch::kDouble); })});
  check({"mean", {x}, single([](auto& t) { return t.mean(); }), 1e-6});
  check({"mean dim", {x}, single([](auto& t) { return t.mean(Dims{0}, true); }), 1e-6});
  check({"mean dims", {x}, single([](auto& t) { return t.mean(Dims{-1, 0}); }), 1e-6});
  check({"prod", {x / 4}, single([](auto& t) { return t.prod(1); }), 1e-5, false});
  check({"prod all", {fractions({5, 2})}, single([](auto& t) { return t.prod(); }), 1e-5, false});
  check({"nansum", {x}, single([](auto& t) { return torch::nansum(t, Dims{0}); })});
  check({"amax", {fractions({5, 3})}, single([](auto& t) { return t.amax(Dims{0}); })});
  check({"amin", {fractions({5, 3})}, single([](auto& t) { return t.amin(Dims{0, 1}, true); })});
  check({"max all", {fractions({5, 3})}, single([](auto& t) { return t.max(); })});
  check({"min all", {fractions({5, 3})}, single([](auto& t) { return t.min(); })});
  check({"amax of integers", {whole_numbers({5, 3}).to(torch::kLong)}, single([](auto& t) { return t.amax(Dims{0}); })});
  // Cut in parts some of which are empty: the maximum of nothing is the smallest number there is, and arithmetic would wrap around.
  const auto few = torch::tensor({5, 3}, torch::kLong);
  check({"amax of integers, less a number", {few}, single([](auto& t) { return t.amax() - torch::ones({}, torch::kLong) * 7; })});
  check({"amin of integers, negated", {few}, single([](auto& t) { return t.amin().neg(); })});
  check({"a function of a maximum that has no value for -infinity", {fractions({3, 2})},
         single([](auto& t) { return torch::special_i1(t.amax(Dims{1})); }), 1e-6, false});
  check({"log of a minimum", {fractions({5, 3}).abs() + 1}, single([](auto& t) { return t.amin(Dims{0}).log(); }), 1e-6, false});
  check({"rsqrt of a minimum", {fractions({5, 3}).abs() + 1}, single([](auto& t) { return t.amin(Dims{0}).rsqrt(); }), 1e-6, false});
  check({"matmul into a tensor", {fractions({5, 3}), fractions({3, 4})}, [](const Tensors& in) {
           torch::NoGradGuard no_grad;
           auto out = torch::empty({5, 4});
           return Tensors{at::matmul_out(out, in[0].detach(), in[1].detach())};
         }, 1e-5, false});
  check({"var", {x}, single([](auto& t) { return t.var(Dims{1}, true); }), 1e-5});
  check({"std all", {x}, single([](auto& t) { return t.std(); }), 1e-5});
  check({"logsumexp", {x}, single([](auto& t) { return t.logsumexp(Dims{1}); }), 1e-5});
  check({"cumsum", {x}, single([](auto& t) { return t.cumsum(1); })});
  check({"argmax", {fractions({5, 3})}, single([](auto& t) { return t.argmax(0); })});
  check({"argmin all", {fractions({5, 3})}, single([](auto& t) { return t.argmin(); })});
  check({"any", {x > 7}, single([](auto& t) { return t.any(); })});
  check({"any dim", {x > 7}, single([](auto& t) { return t.any(0); })});
  check({"all dim", {x > -8}, single([](auto& t) { return t.all(2, true); })});
  check({"count_nonzero", {x}, single([](auto& t) { return torch::count_nonzero(t, Dims{0}); }), 0, false, true});
  check({"max dim", {fractions({5, 3})}, [](const Tensors& in) {
           auto [values, indices] = in[0].max(0);
           return Tensors{values, indices};
         }});
  check({"var_mean",
         {x},
         [](const Tensors& in) {
           auto [var, mean] = torch::var_mean(in[0], Dims{2}, true, false);
           return Tensors{var, mean};
         },
         1e-5});
}

TEST_CASE("ops: means of half precision whose sums it cannot hold", "[ops][reduction][loss]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto x = distribute_tensor(torch::full({3, 60001}, 2, torch::kHalf), mesh, {shard(1)}).tensor();
    const auto is_half_of = [](const at::Tensor& mean, double expected) {
      return mean.scalar_type() == torch::kHalf && full_tensor(mean).eq(expected).all().item<bool>();
    };
    require(is_half_of(x.mean(), 2) && is_half_of(x.mean(Dims{1}, true), 2), "test", "{}", full_tensor(x.mean()).item<double>());
    require(x.mean(Dims{1}, false, torch::kDouble).scalar_type() == torch::kDouble, "test", "another dtype");
#if DTENSOR_TORCH_AT_LEAST(2, 1)
    require(is_half_of(torch::mse_loss(x, torch::zeros_like(x)), 4), "test", "mse_loss");
    const auto far = distribute_tensor(torch::full({1000}, 300, torch::kHalf), mesh, {shard(0)}).tensor();
    const auto scale = distribute_tensor(torch::full({}, 200, torch::kHalf), mesh, {replicate()}).tensor();
    const auto gradient = full_tensor(at::mse_loss_backward(scale, far, torch::zeros_like(far), at::Reduction::Mean));
    require(gradient.sub(120).abs().max().item<double>() < 0.1, "test", "mse_loss_backward: {}", gradient[0].item<double>());
#endif
  }));
}

#if DTENSOR_TORCH_AT_LEAST(2, 0)  // whose own kernel adds up in float
TEST_CASE("ops: norms of half precision whose squares it cannot hold", "[ops][reduction]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const double element : {10.0, 1e-5}) {
      const auto plain = torch::full({64, 16}, element, torch::kHalf);
      const double expected = plain.to(torch::kDouble).norm().item<double>();
      for (const auto& target : {replicate(), shard(0), flat(2)}) {
        const auto x = distribute_tensor(plain, mesh, {shard(0)}).tensor();
        const auto norms = torch::linalg_vector_norm(x.unsqueeze(2).expand({64, 16, 4}), 2, Dims{0, 1});  // of four columns, all alike
        const auto got = full_tensor(redistribute(norms, {target})).to(torch::kDouble);
        require(norms.scalar_type() == torch::kHalf && got.sub(expected).abs().max().item<double>() <= 2e-3 * expected, "test",
                "of {} to {}: {}, expected {}", element, target.str(), got[0].item<double>(), expected);
      }
    }
  }));
}
#endif

TEST_CASE("ops: sums in another dtype are of whole numbers where that is asked for", "[ops][reduction]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto pending = [&] { return distribute_tensor(torch::full({2, 3}, 0.5), mesh, {shard(0)}).tensor().sum(0); };
    require(full_tensor(pending().sum(torch::kLong)).item<int64_t>() == 3, "test", "sum");
    require(full_tensor(pending().cumsum(0, torch::kLong)).equal(torch::tensor({1, 2, 3}, torch::kLong)), "test", "cumsum");
    require(full_tensor(pending().cumsum(0)).equal(torch::tensor({1.0f, 2.0f, 3.0f})), "test", "cumsum of floats");
  }));
}

TEST_CASE("ops: a pending maximum that is no number", "[ops][reduction]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto plain = torch::tensor({{NAN, 1.0f}, {5.0f, 2.0f}});
    const auto bound = distribute_tensor(torch::tensor({3.0f, 3.0f}), mesh, {replicate()}).tensor();
    const auto pending = [&] { return distribute_tensor(plain, mesh, {shard(0)}).tensor().amax(0); };
    const auto largest = plain.amax(0), three = torch::tensor({3.0f, 3.0f});
    require(full_tensor(torch::fmax(pending(), bound)).equal(torch::fmax(largest, three)), "test", "fmax");
    require(full_tensor(torch::fmin(pending(), bound)).equal(torch::fmin(largest, three)), "test", "fmin");
    require(full_tensor(pending().sign()).allclose(largest.sign(), 0, 0, true), "test", "sign");
  }));
}

TEST_CASE("ops: the largest of complex numbers where a rank has none", "[ops][reduction]") {
  REQUIRE_NOTHROW(on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto plain = torch::complex(fractions({3}), fractions({3}, 1));
    const auto x = distribute_tensor(plain, mesh, {shard(0)}).tensor();
    for (const double order : {INFINITY, -INFINITY}) {
      require(full_tensor(torch::linalg_vector_norm(x, order)).equal(torch::linalg_vector_norm(plain, order)), "test", "order {}", order);
    }
  }));
}

TEST_CASE("ops: norms", "[ops][reduction]") {
  const auto x = fractions({5, 3});
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double p : {0.0, 1.0, 2.0, 3.0, infinity, -infinity}) {
    const bool smooth = p == 1 || p == 2 || p == 3;
    check({fmt::format("norm {}", p), {x}, single([p](auto& t) { return t.norm(p); }), 1e-5, smooth});
    check({fmt::format("norm {} of a dim", p),
           {x},
           single([p](auto& t) { return t.norm(p, Dims{0}, true); }),
           1e-5,
           smooth});
    check({fmt::format("vector_norm {}", p),
           {x},
           single([p](auto& t) { return torch::linalg_vector_norm(t, p); }),
           1e-5,
           smooth});
  }
}

TEST_CASE("ops: softmax", "[ops][softmax]") {
  const auto x = fractions({5, 3, 4});
  for (const int64_t dim : {0, 1, -1}) {
    check({fmt::format("softmax {}", dim), {x}, single([dim](auto& t) { return t.softmax(dim); }), 1e-6});
    check({fmt::format("log_softmax {}", dim), {x}, single([dim](auto& t) { return t.log_softmax(dim); }), 1e-6});
  }
  check({"softmax of a number", {x[0][0][0].clone()}, single([](auto& t) { return t.softmax(0); })});
}

TEST_CASE("ops: order and triangles", "[ops][sort]") {
  const auto x = fractions({5, 3});
  check({"sort", {x}, [](const Tensors& in) {
           auto [values, indices] = in[0].sort(0, true);
           return Tensors{values, indices};
         }});
  check({"topk", {x}, [](const Tensors& in) {
           auto [values, indices] = in[0].topk(2, 0);
           return Tensors{values, indices};
         }});
  check({"argsort", {x}, single([](auto& t) { return t.argsort(int64_t{1}); })});
  check({"tril", {fractions({3, 5, 4})}, single([](auto& t) { return t.tril(1); })});
  check({"triu", {x}, single([](auto& t) { return t.triu(); })});
}

TEST_CASE("ops: reductions over gloo", "[ops][reduction]") {
  const auto x = whole_numbers({5, 3});
  check_over("gloo", {"sum", {x}, single([](auto& t) { return t.sum(Dims{0}); })});
  check_over("gloo", {"amax", {fractions({5, 3})}, single([](auto& t) { return t.amax(Dims{0}); })});
  check_over("gloo", {"any", {x > 7}, single([](auto& t) { return t.any(0); })});
  check_over("gloo", {"norm", {x}, single([](auto& t) { return t.norm(); }), 1e-6});
}

TEST_CASE("ops: reductions that need no communication", "[ops][reduction]") {
  const auto x = whole_numbers({6, 5});
  check_free({"sum over a cut dim", {x}, single([](auto& t) { return t.sum(Dims{0}); })}, {3}, {{shard(0)}}, {"(P(sum))"});
  check_free({"sum of sums", {x}, single([](auto& t) { return t.sum(); })}, {3}, {{partial()}}, {"(P(sum))"});
  check_free({"mean of uneven parts", {x}, single([](auto& t) { return t.mean(); }), 1e-6}, {4}, {{shard(1)}},
             {"(P(sum))"});
  check_free({"sum beside a cut", {x}, single([](auto& t) { return t.sum(Dims{0}); })}, {3}, {{shard(1)}}, {"(S(0))"});
  check_free({"keepdim", {x}, single([](auto& t) { return t.sum(Dims{0}, true); })}, {3}, {{shard(1)}}, {"(S(1))"});
  check_free({"largest of empty shards", {whole_numbers({2, 2})}, single([](auto& t) { return t.amax(Dims{0}); })}, {3},
             {{shard(0)}}, {"(P(max))"});
  check_free({"norm", {x}, single([](auto& t) { return t.norm(); }), 1e-6}, {2, 2}, {{shard(0), shard(1)}},
             {"(P(norm2), P(norm2))"});
  check_free({"softmax beside a cut", {x}, single([](auto& t) { return t.softmax(1); }), 1e-6}, {4}, {{shard(0)}},
             {"(S(0))"});
  check_free({"norm of norms",
              {x, x + 1},
              [](const Tensors& in) {
                return Tensors{torch::stack({in[0].norm(), in[1].norm()}).norm()};
              },
              1e-6},
             {2}, {{shard(0)}, {shard(1)}}, {"(P(norm2))"});
}

TEST_CASE("ops: reductions of Partial that have an index or a sign", "[ops][reduction]") {
  CHECK_NOTHROW(on_mesh({3}, [](const DeviceMesh& mesh) {
    // The ranks' extremes are at other places than the extreme of all.
    const auto part = fractions({5, 4}, mesh.coordinate(0));
    const auto whole = torch::maximum(torch::maximum(fractions({5, 4}, 0), fractions({5, 4}, 1)), fractions({5, 4}, 2));
    const auto [values, indices] = torch::max(from_local(part, mesh, {partial(ReduceOp::max)}), 0);
    require(full_tensor(values).equal(std::get<0>(whole.max(0))) && full_tensor(indices).equal(std::get<1>(whole.max(0))), "test",
            "the index of the largest of P(max)");
    // The rank that has none holds the largest number there is.
    const auto least = torch::amin(distribute_tensor(torch::tensor({7, 5}, torch::kLong), mesh, {shard(0)}), {0});
    require(full_tensor(least + 2).item<int64_t>() == 7, "test", "a number added to a pending minimum");
    // A pending norm is written into a tensor with signs.
    const auto signs = -torch::ones({2, 3}), x = whole_numbers({4, 3});
    const auto index = torch::zeros({1, 3}, torch::kLong);
    const auto scattered = [&](const at::Tensor& into, const at::Tensor& from, const at::Tensor& at) {
      return into.scatter(0, at, torch::linalg_vector_norm(from, 2, {0}, true));
    };
    const auto got = scattered(distribute_tensor(signs, mesh, {replicate()}), distribute_tensor(x, mesh, {shard(0)}),
                               distribute_tensor(index, mesh, {replicate()}));
    require(full_tensor(got).allclose(scattered(signs, x, index)), "test", "a norm among numbers with signs");
  }));
}

TEST_CASE("ops: quantiles and their gradients", "[ops][reduction]") {
  // Of equal numbers any may get the gradient.
  const auto different = [](at::IntArrayRef sizes) {
    const auto n = c10::multiply_integers(sizes);
    return torch::arange(n, torch::kLong).mul(11).remainder(n).to(torch::kFloat).div(8).reshape(sizes);
  };
  auto holes = different({5, 7});
  holes[1][2] = holes[3][0] = holes[3][5] = NAN;
  const auto q = torch::tensor({0.25f, 0.5f, 0.875f});
  const auto of = [](auto dim, bool keepdim, const char* how, bool nan) {
    return [=](const Tensors& in) {
      return Tensors{(nan ? torch::nanquantile(in[0], in[1], dim, keepdim, how) : torch::quantile(in[0], in[1], dim, keepdim, how))};
    };
  };
  for (const auto* how : {"linear", "lower", "higher", "midpoint", "nearest"}) {
    check({std::string("quantiles ") + how, {different({5, 7}), q}, of(0, false, how, false)});
    check({std::string("quantiles of all ") + how, {different({5, 7}), q}, of(c10::nullopt, true, how, false)});
    check({std::string("quantiles beside nan ") + how, {holes, q}, of(1, true, how, true), 0, false});
  }
  const auto median = torch::tensor(0.5f);
  check({"a quantile", {different({3, 4, 5}), median}, of(1, true, "linear", false)});
  check({"a quantile of one element", {different({}), median}, of(0, true, "linear", false)});
  check({"a nanquantile of all", {different({3, 4}), median}, of(c10::nullopt, false, "linear", true)});
  check({"quantiles of a dim from the end", {different({5, 7, 3}), q}, of(-2, false, "linear", false)});
  check({"quantiles of the last dim", {different({5, 7, 3}), q}, of(-1, true, "linear", false)});
  check({"quantile of a number", {different({5, 7})}, single([](auto& t) { return torch::quantile(t, 0.25, 1); })});
  check_over("gloo", {"nanquantile of a number", {different({5, 7})}, single([](auto& t) { return torch::nanquantile(t, 0.4, 0, true); })});
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    const auto words = [](const at::Tensor& x, double fraction, int64_t dim) {
      return words_of([&] { torch::quantile(x, fraction, dim); });
    };
    const auto x = different({5, 7}), cut = distribute_tensor(x, mesh, {shard(0)}).tensor();
    for (const auto& [fraction, dim] : std::vector<std::pair<double, int64_t>>{{1.5, 0}, {0.5, 2}}) {
      require(!words(x, fraction, dim).empty() && words(cut, fraction, dim) == words(x, fraction, dim), "test", "got {}",
              words(cut, fraction, dim));
    }
  }));
}
