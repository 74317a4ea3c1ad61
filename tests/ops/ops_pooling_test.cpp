// Pooling under every placement, windows over cut positions among them.
#include "tests/support/op_check.hpp"

#include <limits>

using namespace dtensor;
using namespace dtensor::test;

TEST_CASE("ops: average pooling", "[ops][pooling]") {
  const auto x = fractions({3, 2, 7, 5});
  check({"avg_pool2d", {x}, [](const Tensors& in) { return Tensors{torch::avg_pool2d(in[0], {2, 2})}; }, 1e-5});
  for (const bool ceil : {false, true}) {
    for (const bool with_padding : {false, true}) {
      check({fmt::format("avg_pool2d with padding {} {}", ceil, with_padding),
             {x},
             [=](const Tensors& in) { return Tensors{torch::avg_pool2d(in[0], {3, 2}, {2, 3}, {1, 1}, ceil, with_padding)}; },
             1e-5});
    }
  }
  check({"avg_pool2d with a divisor",
         {x},
         [](const Tensors& in) { return Tensors{torch::avg_pool2d(in[0], {3, 3}, {1, 1}, {1, 1}, false, true, 5)}; },
         1e-5});
  check({"avg_pool2d of a column",
         {fractions({1, 1, 3, 1})},
         [](const Tensors& in) {
           return Tensors{torch::avg_pool2d(in[0], {2, 2}, {1, 1}, {1, 1})};
         },
         1e-5});
  check({"avg_pool1d", {fractions({3, 2, 7})}, [](const Tensors& in) { return Tensors{torch::avg_pool1d(in[0], 3, 2, 1)}; }, 1e-5});
  check({"avg_pool3d",
         {fractions({2, 2, 3, 4, 3})},
         [](const Tensors& in) { return Tensors{torch::avg_pool3d(in[0], {2, 3, 2}, {1, 2, 2}, {1, 1, 0}, true, false)}; },
         1e-5});
  check({"avg_pool2d without samples",
         {fractions({2, 5, 4})},
         [](const Tensors& in) {
           return Tensors{torch::avg_pool2d(in[0], {2, 2}, {1, 1})};
         },
         1e-5});
}

TEST_CASE("ops: maximum pooling", "[ops][pooling]") {
  const auto x = fractions({3, 2, 7, 5});
  const auto indices = [](auto... arguments) {
    return [=](const Tensors& in) {
      auto [y, at] = torch::max_pool2d_with_indices(in[0], arguments...);
      return Tensors{y, at};
    };
  };
  using Two = std::vector<int64_t>;
  check({"max_pool2d", {x}, indices(Two{2, 2}), 0, true, false});
  check({"max_pool2d with padding", {x}, indices(Two{3, 2}, Two{2, 1}, Two{1, 1}), 1e-6, true, false});
  check({"max_pool2d rounded up", {x}, indices(Two{3, 3}, Two{2, 2}, Two{1, 1}, Two{1, 1}, true), 1e-6, true, false});
  check({"max_pool2d with dilation", {x}, indices(Two{3, 2}, Two{1, 2}, Two{1, 1}, Two{2, 3}), 1e-6, true, false});
  check({"max_pool2d of nothing finite",
         {at::full({2, 1, 7, 5}, -std::numeric_limits<float>::infinity())},
         indices(Two{3, 2}, Two{1, 2}, Two{1, 1}, Two{2, 3}), 0, false, false});
  check({"max_pool2d of a column", {fractions({1, 1, 3, 1})}, indices(Two{2, 2}, Two{1, 1}, Two{1, 1}), 1e-6, true, false});
  check({"max_pool3d",
         {fractions({2, 2, 3, 4, 3})},
         [](const Tensors& in) {
           auto [y, at] = torch::max_pool3d_with_indices(in[0], {2, 3, 2}, {1, 2, 2}, {1, 1, 0}, {1, 1, 1}, true);
           return Tensors{y, at};
         },
         1e-6, true, false});
  check({"max_pool1d",
         {fractions({3, 2, 7})},
         [](const Tensors& in) { return Tensors{torch::max_pool1d(in[0], 3, 2, 1)}; },
         1e-6,
         true,
         false});
  check_over("gloo", {"max_pool2d with padding", {x}, indices(Two{3, 2}, Two{2, 1}, Two{1, 1}), 1e-6, true, false});
}

TEST_CASE("ops: pooling of whole planes", "[ops][pooling]") {
  const auto x = fractions({3, 2, 6, 5});
  check({"adaptive_avg_pool2d", {x}, [](const Tensors& in) { return Tensors{at::adaptive_avg_pool2d(in[0], {3, 2})}; }, 1e-5});
  check({"adaptive_avg_pool2d to one", {x}, [](const Tensors& in) { return Tensors{at::adaptive_avg_pool2d(in[0], {1, 1})}; }, 1e-5});
  check({"adaptive_avg_pool1d",
         {fractions({3, 2, 7})},
         [](const Tensors& in) { return Tensors{at::adaptive_avg_pool1d(in[0], {3})}; },
         1e-5});
  check({"adaptive_avg_pool3d",
         {fractions({2, 2, 3, 4, 3})},
         [](const Tensors& in) {
           return Tensors{at::adaptive_avg_pool3d(in[0], {2, 2, 2})};
         },
         1e-5});
  check({"adaptive_max_pool2d",
         {x},
         [](const Tensors& in) {
           auto [y, at] = at::adaptive_max_pool2d(in[0], {3, 2});
           return Tensors{y, at};
         },
         0, true, false});
  check({"adaptive_max_pool3d",
         {fractions({2, 2, 3, 4, 3})},
         [](const Tensors& in) {
           auto [y, at] = at::adaptive_max_pool3d(in[0], {2, 2, 2});
           return Tensors{y, at};
         },
         0, true, false});
  check({"fractional_max_pool2d",
         {x, fractions({3, 2, 2}, 1).abs() / 2.1},
         [](const Tensors& in) {
           auto [y, at] = at::fractional_max_pool2d(in[0], {2, 2}, {3, 2}, in[1].detach());
           return Tensors{y, at};
         },
         0, true, false});
  check({"max_unpool2d",
         {fractions({3, 2, 3, 2})},
         [](const Tensors& in) {
           const auto at = at::arange(36, at::kLong).mul(4).remainder(30).reshape({3, 2, 3, 2});
           return Tensors{at::max_unpool2d(in[0], at, {6, 5})};
         },
         1e-6});
}

TEST_CASE("ops: what pooling communicates", "[ops][pooling]") {
  const auto x = fractions({2, 3, 12, 5});
  check_free({"windows within parts",
              {x},
              [](const Tensors& in) {
                return Tensors{torch::avg_pool2d(in[0], {2, 2})};
              },
              1e-5},
             {3}, {{shard(2)}}, {"(S(2))"});
  check_free({"pending averages",
              {x},
              [](const Tensors& in) {
                return Tensors{torch::avg_pool2d(in[0], {2, 2})};
              },
              1e-5},
             {3}, {{partial()}}, {"(P(sum))"});
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    auto input = placed(x, mesh, {shard(2)}).detach().requires_grad_();
    CommDebugMode comm;
    auto y = torch::max_pool2d(input, {3, 3}, {1, 1}, {1, 1});
    y.backward(torch::ones_like(y));
    require(comm.count() == 2 && comm.count(comm::Collective::all_to_all) == 2, "test",
            "expected a halo and the gradient of one; got\n{}", comm.str());
  }));
}

TEST_CASE("ops: pooling without gradients", "[ops][pooling]") {
  check({"max_pool1d",
         {fractions({3, 2, 7})},
         [](const Tensors& in) {
           torch::NoGradGuard guard;
           return Tensors{torch::max_pool1d(in[0], 3, 2, 1)};
         },
         0, false, false});
}

TEST_CASE("ops: averages of half precision over windows whose sums it cannot hold", "[ops][pooling]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto x = distribute_tensor(torch::full({1, 1, 64, 16}, 300, torch::kBFloat16), mesh, {shard(2)}).tensor();
    const auto y = torch::avg_pool2d(x, 16);
    require(y.scalar_type() == torch::kBFloat16 && full_tensor(y).eq(full_tensor(x).max()).all().item<bool>(), "test", "{}",
            full_tensor(y).max().item<double>());
  }));
}
