// RaggedShard: a placement like any other, through layouts, views, operators, random numbers and training.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"
#include "tests/support/small_training_support.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

const Placement kRagged = ragged_shard(0, {3, 0, 1});

}  // namespace

TEST_CASE("ragged: what each rank holds", "[ragged][layout]") {
  Alone alone(3, 2);
  const auto mesh = init_device_mesh(c10::kCPU, {3}, {"x"});
  const auto layout = Layout::get(mesh, {kRagged}, {8, 5}, at::kFloat);
  REQUIRE(layout->str() == "f32[8, 5] (Ragged(0, 3:0:1)) on (x=3)");
  REQUIRE(layout->local_sizes() == c10::IntArrayRef({2, 5}));
  REQUIRE(layout->intervals(0, {0}) == Intervals{{0, 6}});
  REQUIRE(layout->intervals(0, {1}).empty());
  REQUIRE(layout->runs({2}) == std::vector<Interval>{{30, 40}});
  REQUIRE(layout == Layout::get(mesh, {ragged_shard(-2, {6, 0, 2})}, {8, 5}, at::kFloat));
  REQUIRE(layout != Layout::get(mesh, {ragged_shard(0, {3, 1, 0})}, {8, 5}, at::kFloat));
  // Equal shares are a plain Shard where both cut alike.
  REQUIRE(Layout::get(mesh, {ragged_shard(0, {1, 1, 1})}, {9, 5}, at::kFloat) == Layout::get(mesh, {shard(0)}, {9, 5}, at::kFloat));
  REQUIRE(Layout::get(mesh, {ragged_shard(0, {1, 1, 1})}, {8, 5}, at::kFloat)->intervals(0, {2}) == Intervals{{5, 8}});
  CHECK_THROWS_WITH(Layout::get(mesh, {ragged_shard(0, {1, 2})}, {8, 5}, at::kFloat), says("got 2 shares; expected one per rank"));
  CHECK_THROWS_WITH(Layout::get(mesh, {ragged_shard(0, {1, 2, 3}, 3)}, {8, 5}, at::kFloat), says("does not divide the length 8"));
  CHECK_THROWS_WITH(Layout::get(mesh, {ragged_shard(2, {1, 2, 3})}, {8, 5}, at::kFloat), says("out of range"));
}

TEST_CASE("ragged: cuts a part of a cut", "[ragged][layout]") {
  CHECK_NOTHROW(on_mesh({2, 3}, [](const DeviceMesh& mesh) {
    const auto whole = torch::arange(40).view({20, 2});
    for (const auto& placements :
         {Placements{shard(0), kRagged}, Placements{ragged_shard(0, {1, 3}), kRagged}, Placements{ragged_shard(0, {1, 4}), shard(0)},
          Placements{shard(1), kRagged}, Placements{ragged_shard(0, {0, 1}), ragged_shard(1, {0, 1, 0})}}) {
      const auto tensor = distribute_tensor(whole, mesh, placements);
      require(tensor.full_tensor().equal(whole), "test", "{} loses elements", tensor.layout().str());
      require(tensor.redistribute({replicate(), shard(0)}).full_tensor().equal(whole), "test", "{} is moved wrongly",
              tensor.layout().str());
    }
  }));
}

TEST_CASE("ragged: shares that sum to the number of ranks and are not equal", "[ragged][layout]") {
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh(
        {3},
        [](const DeviceMesh& mesh) {
          const auto whole = torch::arange(12).view({6, 2});
          const auto tensor = distribute_tensor(whole, mesh, {ragged_shard(0, {2, 0, 1})});
          const auto mine = mesh.coordinate(0) == 0 ? whole.narrow(0, 0, 4) : whole.narrow(0, 4, mesh.coordinate(0) == 1 ? 0 : 2);
          require(tensor.to_local().equal(mine), "test", "got {}", tensor.layout().str());
        },
        transport));
  }
  CHECK_NOTHROW(on_mesh({2, 3}, [](const DeviceMesh& mesh) {
    // In the shape of two dims the first cut has another name, beside which the second is one of an even length.
    const auto whole = torch::arange(3).view({1, 3});
    const auto tensor = distribute_tensor(whole, mesh, {strided_shard(1, 3), ragged_shard(1, {2, 0, 1})});
    for (const int64_t dim : {0, 1, 2})
      require(full_tensor(tensor->unsqueeze(dim)).equal(whole.unsqueeze(dim)), "test", "unsqueeze({}) differs", dim);
  }));
}

TEST_CASE("ragged: views and pointwise operators move nothing", "[ragged]") {
  const auto x = fractions({8, 6}), y = fractions({8, 6}, 1);
  const std::vector<Placements> ragged{{kRagged}};
  check_free({"flatten", {x}, [](const Tensors& in) { return Tensors{in[0].flatten() * 2}; }}, {3}, ragged, {"(Ragged(0, 3:0:1, unit=6))"});
  check_free({"unflatten",
              {x},
              [](const Tensors& in) {
                return Tensors{in[0].flatten().view({8, 2, 3})};
              }},
             {3}, ragged, {"(Ragged(0, 3:0:1))"});
  check_free({"transpose", {x}, [](const Tensors& in) { return Tensors{in[0].t().contiguous()}; }}, {3}, ragged, {"(Ragged(1, 3:0:1))"});
  check_free({"add", {x, y}, [](const Tensors& in) { return Tensors{in[0] + in[1].tanh()}; }}, {3}, {{kRagged}, {kRagged}},
             {"(Ragged(0, 3:0:1))"});
  check_free({"sum", {x}, [](const Tensors& in) { return Tensors{in[0].sum(0), in[0].sum(1)}; }, 1e-5}, {3}, ragged,
             {"(P(sum))", "(Ragged(0, 3:0:1))"});
  check_free({"matmul", {x, fractions({6, 4})}, [](const Tensors& in) { return Tensors{in[0].matmul(in[1])}; }, 1e-5}, {3},
             {{kRagged}, {replicate()}}, {"(Ragged(0, 3:0:1))"});
  check_free({"contraction", {x, fractions({8, 4})}, [](const Tensors& in) { return Tensors{in[0].t().matmul(in[1])}; }, 1e-5}, {3},
             {{kRagged}, {kRagged}}, {"(P(sum))"});
  check_free({"cat", {x, y}, [](const Tensors& in) { return Tensors{torch::cat({in[0], in[1]}, 1)}; }}, {3}, {{kRagged}, {kRagged}},
             {"(Ragged(0, 3:0:1))"});
}

TEST_CASE("ragged: random numbers are those of one device", "[ragged][random]") {
  for (const auto& sizes : {Sizes{5000}, Sizes{50, 38}, Sizes{8, 3, 400}}) {
    torch::manual_seed(2);
    const auto uniform = torch::rand(sizes), normal = torch::randn(sizes), after = torch::rand({3});
    for (const auto* transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_mesh(
          {3},
          [&](const DeviceMesh& mesh) {
            for (const auto& placement : {ragged_shard(0, {3, 0, 1}), ragged_shard(0, {1, 5, 2}, 2), ragged_shard(-1, {0, 1, 2})}) {
              torch::manual_seed(2);
              require(rand(sizes, mesh, {placement}).full_tensor().equal(uniform), "test", "other uniform numbers under {}",
                      placement.str());
              require(randn(sizes, mesh, {placement}).full_tensor().equal(normal), "test", "other normal numbers under {}",
                      placement.str());
              require(torch::rand({3}).equal(after), "test", "the generator went on otherwise under {}", placement.str());
            }
          },
          transport));
    }
  }
}

TEST_CASE("ragged: a model trains with its parameters cut so", "[ragged]") {
  check_small_model_trains([](torch::nn::Module& model, const DeviceMesh& mesh) {
    const auto placed = ragged_shard(0, {2, 0, 1, 5});
    parallelize_module(model, mesh, {{"*", {{"dim0", placed}}}});
    require(DTensor(model.parameters()[0]).placements()[0] == placed, "test", "not placed so");
  });
}
