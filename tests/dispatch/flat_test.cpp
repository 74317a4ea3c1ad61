// Flat: elements dealt out in pieces of a buffer, through layouts, views, operators, random numbers and training.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"
#include "tests/support/small_training_support.hpp"

#include <algorithm>

using namespace dtensor;
using namespace dtensor::test;

TEST_CASE("flat: what each rank holds", "[flat][layout]") {
  Alone alone(3, 1);
  const auto mesh = init_device_mesh(c10::kCPU, {3}, {"x"});
  const auto layout = Layout::get(mesh, {flat(12, 5)}, {4, 7}, at::kFloat);
  REQUIRE(layout->str() == "f32[4, 7] (Flat(12, at 5)) on (x=3)");
  REQUIRE(layout->local_sizes() == c10::IntArrayRef({1, 12}));
  REQUIRE(layout->flat_shard({0}) == Interval{0, 7});
  REQUIRE(layout->flat_shard({2}) == Interval{19, 28});
  REQUIRE(layout->runs({1}) == std::vector<Interval>{{7, 19}});
  using Box = std::vector<Interval>;
  REQUIRE(layout->boxes({1}) == std::vector<Box>{{{1, 2}, {0, 7}}, {{2, 3}, {0, 5}}});
  // Over other cuts: the elements that these leave.
  const auto grid = DeviceMesh(c10::kCPU, {0, 1, 2}, {3, 1}, {"x", "y"});
  REQUIRE(Layout::get(grid, {flat(12, 5), shard(1)}, {4, 7}, at::kFloat)->local_sizes() == c10::IntArrayRef({1, 12}));
  CHECK_THROWS_WITH(Layout::get(mesh, {flat(9, 5)}, {4, 7}, at::kFloat), says("pieces of 9 do not reach 33"));
  CHECK_THROWS_WITH(Layout::get(mesh, {flat(0)}, {4, 7}, at::kFloat), says("expected at least 1 and 0"));
  CHECK_THROWS_WITH(Layout::get(mesh, {flat(4)}, {}, at::kFloat), says("a single number has no elements"));
  CHECK_THROWS_WITH(Layout::get(grid, {flat(12), flat(28)}, {4, 7}, at::kFloat), says("another mesh dimension is flat"));
  CHECK_THROWS_WITH(Layout::get(mesh, {flat(12)}, {4, 7}, {0, 1}, at::kFloat), says("without gaps or repetitions"));
}

TEST_CASE("flat: the boxes of all ranks are the tensor", "[flat][layout]") {
  Alone alone(4, 0);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"x", "y"});
  for (const auto& placements :
       {Placements{flat(31, 2), replicate()}, Placements{flat(20, 3), shard(1)}, Placements{strided_shard(2, 2), flat(17)}}) {
    const auto layout = Layout::get(mesh, placements, {3, 5, 4}, at::kFloat);
    std::vector<int> held(60);
    for (int64_t rank = 0; rank < 4; ++rank) {
      const auto coordinate = mesh.coordinate_of(rank);
      int64_t elements = 0;
      for (const auto& run : layout->runs(coordinate)) {
        elements += run.length();
        for (int64_t i = run.begin; i < run.end; ++i) ++held[i];
      }
      REQUIRE(elements == layout->flat_shard(coordinate).length());
    }
    const int copies = placements[1].is_replicate() ? 2 : 1;
    REQUIRE(std::ranges::all_of(held, [&](int count) { return count == copies; }));
  }
}

TEST_CASE("flat: tensors without elements and lists of one view", "[flat]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& sizes : {std::vector<int64_t>{2, 6, 0}, {0, 3}, {4, 0, 2}}) {
      const auto empty = distribute_tensor(torch::empty(sizes), mesh, {flat(3, 2)});
      require(full_tensor(empty->mul(2)).sizes() == c10::IntArrayRef(sizes), "test", "{}", empty.layout().str());
      require(full_tensor(empty->transpose(0, 1)).sizes() == torch::empty(sizes).transpose(0, 1).sizes(), "test", "{}",
              empty.layout().str());
    }
    const auto one = distribute_tensor(torch::ones({1, 1}), mesh, {flat(3, 2)});
    for (const auto& number : {one->squeeze(), one->view(at::IntArrayRef()), one->reshape(at::IntArrayRef())})
      require(number.item<double>() == 1, "test", "a number");
    const auto whole = torch::arange(6).view({2, 3});
    const auto tensor = distribute_tensor(whole, mesh, {flat(4)});
    require(full_tensor(tensor->chunk(1, 1)[0]).equal(whole), "test", "a chunk that is all");
    require(full_tensor(tensor->split(3, 1)[0]).equal(whole), "test", "a piece that is all");
  }));
}

TEST_CASE("flat: over and under other cuts", "[flat]") {
  CHECK_NOTHROW(on_mesh({2, 3}, [](const DeviceMesh& mesh) {
    const auto whole = torch::arange(240).view({12, 5, 4});
    for (const auto& placements : {Placements{flat(41, 2), shard(0)}, Placements{shard(1), flat(49)},
                                   Placements{flat(50), strided_shard(0, 2)}, Placements{replicate(), flat(100, 17)}}) {
      const auto tensor = distribute_tensor(whole, mesh, placements);
      require(tensor.full_tensor().equal(whole), "test", "{} loses elements", tensor.layout().str());
      for (const auto& other : {Placements{replicate(), shard(0)}, Placements{shard(2), flat(100)}, Placements{flat(150), replicate()}}) {
        require(tensor.redistribute(other).full_tensor().equal(whole), "test", "{} is moved wrongly", tensor.layout().str());
      }
      const auto turned = tensor->permute({2, 0, 1});
      require(full_tensor(turned).equal(whole.permute({2, 0, 1})), "test", "{} is turned wrongly", tensor.layout().str());
    }
  }));
}

TEST_CASE("flat: views and pointwise operators and whole reductions move nothing", "[flat]") {
  const auto x = fractions({8, 6}), y = fractions({8, 6}, 1);
  const std::vector<Placements> cut{{flat(17, 2)}};
  const std::string same = "(Flat(17, at 2))";
  check_free({"flatten", {x}, [](const Tensors& in) { return Tensors{in[0].flatten() * 2}; }}, {3}, cut, {same});
  check_free({"unflatten", {x}, [](const Tensors& in) { return Tensors{in[0].view({4, 2, 2, 3}).unsqueeze(1)}; }}, {3}, cut, {same});
  check_free({"transpose", {x}, [](const Tensors& in) { return Tensors{in[0].t().t()}; }}, {3}, cut, {same});
  check_free({"add",
              {x, y},
              [](const Tensors& in) {
                return Tensors{in[0] + in[1].tanh(), (in[0].t() * 2).t()};
              }},
             {3}, {cut[0], cut[0]}, {same, same});
  check_free({"norm",
              {x},
              [](const Tensors& in) {
                return Tensors{in[0].sum(), in[0].norm(), in[0].mean(), in[0].abs().max()};
              },
              1e-5},
             {3}, cut, {"(P(sum))", "(P(norm2))", "(P(sum))", "(P(max))"});
  check_free({"copies",
              {x},
              [](const Tensors& in) {
                return Tensors{in[0].clone(), in[0].to(at::kDouble), torch::zeros_like(in[0])};
              }},
             {3}, cut, {same, same, same});
  check_free({"in place", {x, y}, [](const Tensors& in) {
                return Tensors{in[0].clone().addcmul_(in[0], in[1], 0.5).mul_(3).zero_().fill_(2).add_(in[1])};
              }}, {3}, {cut[0], cut[0]}, {same});
}

TEST_CASE("flat: a write reaches views that had to be copied", "[flat]") {
  CHECK_NOTHROW(on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto tensor = distribute_tensor(torch::arange(24).view({6, 4}), mesh, {flat(9, 1)});
    const auto row = tensor->slice(0, 2, 4);
    row.zero_();
    const auto expected = torch::arange(24).view({6, 4});
    expected.slice(0, 2, 4).zero_();
    require(tensor.full_tensor().equal(expected), "test", "the base does not see a write to a slice");
    tensor->fill_(7);
    require(full_tensor(row).equal(torch::full({2, 4}, 7)), "test", "a slice does not see a write to its base");
  }));
}

TEST_CASE("flat: random numbers are those of one device", "[flat][random]") {
  for (const auto& sizes : {Sizes{5000}, Sizes{50, 38}, Sizes{8, 3, 400}, Sizes{7, 2}}) {
    torch::manual_seed(2);
    const auto uniform = torch::rand(sizes), normal = torch::randn(sizes), after = torch::rand({3});
    const auto elements = uniform.numel();
    for (const auto* transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_mesh(
          {3, 2},
          [&](const DeviceMesh& mesh) {
            for (const auto& placements :
                 {Placements{flat(elements / 3 + 7, 13), replicate()}, Placements{flat(elements), shard(0)},
                  Placements{flat(elements / 3 + 400, 1), shard(-1)}, Placements{shard(0), flat(elements / 2 + 1)}}) {
              torch::manual_seed(2);
              require(rand(sizes, mesh, placements).full_tensor().equal(uniform), "test", "other uniform numbers under {}",
                      str(placements));
              require(randn(sizes, mesh, placements).full_tensor().equal(normal), "test", "other normal numbers under {}", str(placements));
              require(torch::rand({3}).equal(after), "test", "the generator went on otherwise under {}", str(placements));
            }
          },
          transport));
    }
  }
}

TEST_CASE("flat: a counter's numbers are those of one device", "[flat][random]") {
  const Sizes sizes{50, 38};
  Generator counter(5);
  const auto expected = at::empty(sizes).normal_(0, 1, counter);
  CHECK_NOTHROW(on_mesh({3, 2}, [&](const DeviceMesh& mesh) {
    for (const auto& placements : {Placements{flat(700, 13), replicate()}, Placements{flat(400, 1), shard(1)}}) {
      Generator own(5);
      const auto drawn = empty(sizes, mesh, placements);
      drawn->normal_(0, 1, own);
      require(drawn.full_tensor().equal(expected), "test", "other numbers under {}", str(placements));
    }
  }));
}

TEST_CASE("flat: a model trains with its parameters cut so", "[flat]") {
  check_small_model_trains([](torch::nn::Module& model, const DeviceMesh& mesh) {
    parallelize_module(model, mesh, {{"*", {{"dim0", flat(51, 3)}}}});
  });
}

TEST_CASE("flat: a gather is an error where communication is explicit", "[flat][errors]") {
  CHECK_THROWS_WITH(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto x = distribute_tensor(fractions({6, 4}), mesh, {flat(14)});
    const auto region = explicit_communication();
    x->mul(2);  // moves nothing
    x->matmul(x->t());
  }), says("would be moved implicitly"));
}

TEST_CASE("flat: prints", "[flat]") {
  Alone alone(3, 0);
  const auto mesh = init_device_mesh(c10::kCPU, {3}, {"x"});
  REQUIRE(visualize(*Layout::get(mesh, {flat(12, 5)}, {4, 7}, at::kFloat)) ==
          "f32[4, 7] (Flat(12, at 5)) on (x=3)\n"
          "elements | of         | ranks\n"
          "0:7      | [0:4, 0:7] | 0\n"
          "7:19     | [0:4, 0:7] | 1\n"
          "19:28    | [0:4, 0:7] | 2\n");
}

namespace {

// Every placement on each mesh dimension, and a flat cut in each position beside every other.
std::vector<Placements> all_layouts(const DeviceMesh& mesh, int64_t elements) {
  const auto on = [&](int64_t m) {
    std::vector<int64_t> shares(mesh.size(m), 1);
    shares[0] = 2, shares.back() = 0;
    return std::vector<Placement>{replicate(), shard(0), strided_shard(1, 2), ragged_shard(0, shares), partial(), partial(ReduceOp::max),
                                  flat((elements + 3) / mesh.size(m) + 2, 3)};
  };
  std::vector<Placements> all;
  for (const auto& first : on(0)) {
    if (mesh.ndim() == 1) all.push_back({first});
    for (const auto& second : mesh.ndim() > 1 ? on(1) : std::vector<Placement>()) {
      if (!first.is_flat() || !second.is_flat()) all.push_back({first, second});
    }
  }
  return all;
}

// Maxima of equal values; sums of unequal parts.
at::Tensor laid_out(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  auto without = placements;
  for (auto& p : without) p = p.is_partial(ReduceOp::max) ? replicate() : p;
  return redistribute(placed(whole, mesh, without), placements);
}

bool any_flat(const Placements& placements) {
  return std::ranges::any_of(placements, [](const Placement& p) { return p.is_flat(); });
}

}  // namespace

TEST_CASE("flat: two operands under every pair of layouts", "[flat]") {
  const auto x = whole_numbers({4, 6}), y = whole_numbers({4, 6}, 2);
  const std::vector<std::pair<std::string, Function>> operators{
      {"eq", [](const Tensors& in) { return Tensors{in[0].eq(in[1])}; }},
      {"add", [](const Tensors& in) { return Tensors{in[0] + in[1]}; }},
      {"mul", [](const Tensors& in) { return Tensors{in[0] * in[1]}; }},
      {"add_", [](const Tensors& in) { return Tensors{in[0].clone().add_(in[1])}; }},
      {"_foreach_sub", [](const Tensors& in) { return at::_foreach_sub({in[0], in[1]}, {in[1], in[1]}); }}};
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}}) {
    CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) {
      const auto layouts = all_layouts(mesh, x.numel());
      for (const auto& first : layouts) {
        for (const auto& second : layouts) {
          if (mesh.ndim() > 1 && !any_flat(first) && !any_flat(second)) continue;  // tests of operators have these
          const Tensors in{laid_out(x, mesh, first), laid_out(y, mesh, second)};
          for (const auto& [name, run] : operators) {
            const auto expected = run({x, y}), got = run(in);
            for (size_t i = 0; i < got.size(); ++i)
              require(full_tensor(got[i]).equal(expected[i]), "test", "{} of {} and {} differs", name, str(first), str(second));
          }
        }
      }
    }));
  }
}

TEST_CASE("flat: three operands under drawn layouts", "[flat]") {
  const Tensors plain{whole_numbers({4, 6}).gt(0), whole_numbers({4, 6}, 1), whole_numbers({4, 6}, 2)};
  const std::vector<std::pair<std::string, Function>> operators{
      {"where", [](const Tensors& in) { return Tensors{torch::where(in[0], in[1], in[2])}; }},
      {"addcmul", [](const Tensors& in) { return Tensors{in[1].addcmul(in[2], in[0].to(at::kFloat))}; }},
      {"clamp", [](const Tensors& in) { return Tensors{in[1].clamp(in[2], in[2] + 3)}; }}};
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
      const auto layouts = all_layouts(mesh, plain[0].numel());
      const int64_t count = static_cast<int64_t>(layouts.size()), draws = transport[0] == 't' ? 1500 : 100;
      for (int64_t i = 0; i < draws; ++i) {
        Tensors in;
        std::string said;
        for (int64_t k = 0; k < 3; ++k) {
          auto placements = layouts[(i * (7 + 4 * k) + 11 * k) % count];
          for (auto& p : placements) p = k == 0 && p.is_partial() ? replicate() : p;  // of a mask
          said += str(placements) + " ";
          in.push_back(laid_out(plain[k], mesh, placements));
        }
        for (const auto& [name, run] : operators) {
          require(full_tensor(run(in)[0]).equal(run(plain)[0]), "test", "{} of {} differs", name, said);
        }
      }
    }, transport));
  }
}
