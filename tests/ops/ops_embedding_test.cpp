// Embedding, indexing, joining and creation, under every placement.
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

TEST_CASE("ops: embedding", "[ops][embedding]") {
  const auto table = whole_numbers({7, 4}), tokens = indices({5, 3}, 7);
  check({"embedding", {table, tokens}, [](const Tensors& in) { return Tensors{torch::embedding(in[0], in[1])}; }});
  check({"padding", {table, tokens}, [](const Tensors& in) { return Tensors{torch::embedding(in[0], in[1], 2)}; }});
  check({"scaled by frequency",
         {table, tokens},
         [](const Tensors& in) { return Tensors{torch::embedding(in[0], in[1], -1, true)}; },
         1e-6});
  check_free({"rows of other ranks",
              {table, tokens},
              [](const Tensors& in) { return Tensors{torch::embedding(in[0], in[1])}; }},
             {3}, {{shard(0)}, {replicate()}}, {"(P(sum))"});
  check_free(
      {"batch and columns", {table, tokens}, [](const Tensors& in) { return Tensors{torch::embedding(in[0], in[1])}; }},
      {2, 2}, {{replicate(), shard(1)}, {shard(0), replicate()}}, {"(S(0), S(2))"});
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    const auto cut = placed(table, mesh, {shard(0)}), wrong = placed(tokens + 3, mesh, {replicate()});
    bool thrown = false;
    try {
      torch::embedding(cut, wrong);
    } catch (const c10::Error& error) {
      thrown = std::string(error.what()).find("index out of range") != std::string::npos;
    }
    require(thrown, "test", "an index out of range went unnoticed");
  }));
}

TEST_CASE("ops: indexing that reads", "[ops][indexing]") {
  const auto x = whole_numbers({5, 3, 4});
  check(
      {"index_select", {x, indices({4}, 3)}, [](const Tensors& in) { return Tensors{in[0].index_select(1, in[1])}; }});
  check({"gather", {x, indices({5, 3, 2}, 4)}, [](const Tensors& in) { return Tensors{in[0].gather(2, in[1])}; }});
  check({"gather of fewer", {x, indices({4, 3, 4}, 5)}, [](const Tensors& in) {
           return Tensors{in[0].gather(0, in[1])};
         }});
  // A mask first: what the shape of one result hangs on must not be taken for what all do.
  check({"index by a mask and by positions",
         {x, x.select(2, 0).select(1, 0) > 0, x.permute({2, 1, 0}), indices({2}, 3)},
         [](const Tensors& in) { return Tensors{in[0].index({in[1]}), in[2].index({torch::indexing::Slice(), in[3]})}; },
         0,
         true,
         false});
  check({"index", {x, indices({2, 2}, 5)}, [](const Tensors& in) { return Tensors{in[0].index({in[1]})}; }});
  check({"index of two dims", {x, indices({2, 1}, 3), indices({3}, 4)}, [](const Tensors& in) {
           return Tensors{in[0].index({torch::indexing::Slice(), in[1], in[2]})};
         }});
  check({"index of dims apart", {x, indices({2}, 5), indices({2}, 4)}, [](const Tensors& in) {
           return Tensors{in[0].index({in[1], torch::indexing::Slice(), in[2]})};
         }});
  check({"index by a mask", {x, x > 2}, [](const Tensors& in) { return Tensors{in[0].index({in[1]})}; }});
  check({"masked_select", {x, x > 2}, [](const Tensors& in) { return Tensors{in[0].masked_select(in[1])}; }});
  check({"one_hot", {indices({5}, 3)}, [](const Tensors& in) { return Tensors{torch::one_hot(in[0], 3)}; }});
  check({"take", {x, indices({4}, 60)}, [](const Tensors& in) { return Tensors{in[0].take(in[1])}; }, 0, false});
}

TEST_CASE("ops: indexing that writes into a copy", "[ops][indexing]") {
  const auto x = whole_numbers({5, 3, 4});
  check({"scatter",
         {x, indices({5, 3, 4}, 1), whole_numbers({5, 3, 4}, 1)},
         [](const Tensors& in) { return Tensors{in[0].scatter(1, in[1], in[2])}; },
         0,
         false});
  check({"scatter_add", {x, indices({5, 3, 2}, 4), whole_numbers({5, 3, 2}, 1)}, [](const Tensors& in) {
           return Tensors{in[0].scatter_add(2, in[1], in[2])};
         }});
  check({"index_add", {x, indices({2}, 3), whole_numbers({5, 2, 4}, 1)}, [](const Tensors& in) {
           return Tensors{in[0].index_add(1, in[1], in[2])};
         }});
  check({"index_fill", {x, indices({2}, 3)}, [](const Tensors& in) { return Tensors{in[0].index_fill(1, in[1], 2)}; }});
  check({"index_put",
         {x, indices({2}, 3), whole_numbers({4}, 1)},
         [](const Tensors& in) {
           return Tensors{in[0].clone().index_put_({torch::indexing::Slice(), in[1]}, in[2])};
         },
         0,
         false});
  check({"index_put of a mask",
         {x, x > 2},
         [](const Tensors& in) { return Tensors{in[0].clone().index_put_({in[1]}, torch::tensor(1.0f))}; },
         0,
         false,
         false});
  check({"masked_scatter",
         {x, x > 2, whole_numbers({60}, 1)},
         [](const Tensors& in) { return Tensors{in[0].masked_scatter(in[1], in[2])}; },
         0,
         false});
  check({"masked_scatter_ of another memory order",
         {x, x > 2, whole_numbers({60}, 1)},
         [](const Tensors& in) {
           return Tensors{in[0].clone().permute({2, 0, 1}).masked_scatter_(in[1].permute({2, 0, 1}).contiguous(), in[2])};
         },
         0,
         false});
}

TEST_CASE("ops: writing by index", "[ops][indexing]") {
  const auto x = whole_numbers({5, 3, 4});
  const auto along = [&](const char* name, at::Tensor index, at::Tensor source, auto write) {
    const Tensors inputs = source.defined() ? Tensors{x, index, source} : Tensors{x, index};
    const auto run = [write](const Tensors& in) {
      auto self = in[0].clone();
      write(self, in);
      return Tensors{self};
    };
    check({name, inputs, run, 0, false, false});
  };
  along("scatter_", indices({4, 3, 4}, 5), whole_numbers({4, 3, 4}, 1),
        [](auto& t, auto& in) { t.scatter_(0, in[1], in[2]); });
  along("scatter_ of a value", indices({2, 3, 4}, 5), {}, [](auto& t, auto& in) { t.scatter_(0, in[1], 2.5); });
  along("scatter_add_", indices({7, 3, 4}, 5), whole_numbers({7, 3, 4}, 1),
        [](auto& t, auto& in) { t.scatter_add_(0, in[1], in[2]); });
  along("index_add_", indices({7}, 5), whole_numbers({7, 3, 4}, 1),
        [](auto& t, auto& in) { t.index_add_(0, in[1], in[2], 2); });
  along("index_copy_", indices({3}, 4), whole_numbers({5, 3, 3}, 1),
        [](auto& t, auto& in) { t.index_copy_(2, in[1], in[2]); });
  along("index_fill_", indices({2}, 5), {}, [](auto& t, auto& in) { t.index_fill_(0, in[1], 4); });
  along("index_put_ from the end", indices({3}, 5) - 5, whole_numbers({3, 3, 4}, 1),
        [](auto& t, auto& in) { t.index_put_({in[1]}, in[2]); });
  along("index_put_ of two dims", indices({2, 1}, 3), whole_numbers({5, 2, 3}, 1), [](auto& t, auto& in) {
    t.index_put_(c10::List<c10::optional<at::Tensor>>({at::Tensor(), in[1], torch::arange(3)}), in[2], true);
  });
}

TEST_CASE("ops: cat and stack and repeat and roll", "[ops][join]") {
  const auto x = whole_numbers({5, 3}), y = whole_numbers({5, 2}, 1), z = whole_numbers({5, 3}, 2);
  check({"cat", {x, y}, [](const Tensors& in) { return Tensors{torch::cat({in[0], in[1]}, 1)}; }});
  check({"cat with nothing", {x, torch::empty({0})}, [](const Tensors& in) {
           return Tensors{torch::cat({in[0], in[1]}, 0)};
         }});
  check({"stack", {x, z}, [](const Tensors& in) { return Tensors{torch::stack({in[0], in[1]}, 1)}; }});
  check({"repeat", {x}, [](const Tensors& in) { return Tensors{in[0].repeat({2, 1, 3})}; }});
  check({"roll", {x}, [](const Tensors& in) { return Tensors{in[0].roll(1, 0)}; }});
  const auto thin = whole_numbers({4, 3, 2, 1}).as_strided({4, 3, 2, 1}, {6, 1, 3, 3});  // channels last
  check({"roll keeps the memory order", {thin}, [](const Tensors& in) { return Tensors{in[0].roll(-1, 0)}; }, 0, true, false});
  check_free({"stack of norms",
              {x, z},
              [](const Tensors& in) {
                return Tensors{torch::stack({in[0].sum(), in[1].sum()})};
              }},
             {3}, {{shard(0)}, {replicate()}}, {"(P(sum))"});
}

TEST_CASE("ops: creation and copies", "[ops][creation]") {
  const auto x = whole_numbers({5, 3}), y = whole_numbers({5, 3}, 1);
  check({"zeros_like", {x}, [](const Tensors& in) { return Tensors{torch::zeros_like(in[0])}; }});
  check({"full_like", {x}, [](const Tensors& in) { return Tensors{torch::full_like(in[0], 2.5, torch::kDouble)}; }});
  check({"new_ones", {x}, [](const Tensors& in) { return Tensors{in[0].new_ones({5, 3})}; }});
  check({"new_zeros", {x}, [](const Tensors& in) { return Tensors{in[0].new_zeros({2, 7}, torch::kLong)}; }});
  check({"new_full", {x}, [](const Tensors& in) { return Tensors{in[0].new_full({5, 3}, 3)}; }});
  check({"clone", {x}, [](const Tensors& in) { return Tensors{in[0].clone()}; }});
  check({"clone of a transpose", {x}, [](const Tensors& in) { return Tensors{in[0].t().clone()}; }});
  check({"contiguous transpose", {x}, [](const Tensors& in) { return Tensors{in[0].t().contiguous()}; }});
  check({"to double", {x}, [](const Tensors& in) { return Tensors{in[0].to(torch::kDouble)}; }});
  check({"to integers", {x / 2}, [](const Tensors& in) { return Tensors{in[0].to(torch::kLong)}; }});
  check({"to bool", {x}, [](const Tensors& in) { return Tensors{in[0].to(torch::kBool)}; }});
  check({"copy_", {x, y}, [](const Tensors& in) { return Tensors{in[0].clone().copy_(in[1])}; }});
  check({"broadcasting copy_", {x, whole_numbers({3})}, [](const Tensors& in) {
           return Tensors{in[0].clone().copy_(in[1])};
         }});
  check({"zero_", {x}, [](const Tensors& in) { return Tensors{in[0].clone().zero_()}; }});
  check({"fill_", {x}, [](const Tensors& in) { return Tensors{in[0].clone().fill_(3)}; }, 0, false, false});
  check({"masked_fill_", {x, x > 1}, [](const Tensors& in) {
           return Tensors{in[0].clone().masked_fill_(in[1].detach(), 0)};
         }});
  const auto ones = [](const Tensors& in) { return Tensors{torch::ones_like(in[0])}; };
  check_free({"ones like a cut", {x}, ones}, {3}, {{shard(1)}}, {"(S(1))"});
  check_free({"ones like a sum", {x}, ones}, {3}, {{partial()}}, {"(R)"});
  check_free({"clone of a sum", {x}, [](const Tensors& in) { return Tensors{in[0].clone()}; }}, {3}, {{partial()}},
             {"(P(sum))"});
}

TEST_CASE("ops: embedding bag", "[ops][embedding]") {
  const auto table = whole_numbers({6, 3}), positions = indices({7}, 6), offsets = torch::tensor({0, 2, 2, 5}, torch::kLong);
  const auto factors = whole_numbers({7}, 1);
  check(
      {"sum", {table, positions, offsets}, [](const Tensors& in) { return Tensors{std::get<0>(at::embedding_bag(in[0], in[1], in[2]))}; }});
  check({"mean", {table, positions, offsets}, [](const Tensors& in) {
           return Tensors{std::get<0>(at::embedding_bag(in[0], in[1], in[2], false, 1))};
         }, 1e-6});
  check({"max", {table, positions, offsets}, [](const Tensors& in) {
           return Tensors{std::get<0>(at::embedding_bag(in[0], in[1], in[2], false, 2))};
         }, 0, false});
  check({"weighted, with the last offset", {table, positions, torch::tensor({0, 3, 7}, torch::kLong), factors}, [](const Tensors& in) {
           return Tensors{std::get<0>(at::embedding_bag(in[0], in[1], in[2], false, 0, false, in[3], true))};
         }});
  check({"padded", {table, positions, offsets}, [](const Tensors& in) {
           return Tensors{std::get<0>(at::embedding_bag(in[0], in[1], in[2], false, 1, false, {}, false, 0))};
         }, 1e-6});
  check_free({"a sum of rows of a cut table", {table, positions, offsets}, [](const Tensors& in) {
                return Tensors{std::get<0>(at::embedding_bag(in[0], in[1], in[2]))};
              }}, {3}, {{shard(0)}, {replicate()}, {replicate()}}, {"(P(sum))"});
}

TEST_CASE("ops: bags of half precision are added up in float", "[ops][embedding]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    const auto weight = distribute_tensor(torch::ones({10, 4}, torch::kBFloat16), mesh, {shard(1)}).tensor();
    const auto bags = torch::embedding_bag(weight, torch::zeros({1024}, torch::kLong), torch::zeros({1}, torch::kLong), false, 0);
    require(full_tensor(std::get<0>(bags)).eq(1024).all().item<bool>(), "test", "{}", full_tensor(std::get<0>(bags)).max().item<double>());
  }));
}

TEST_CASE("ops: index_fill counts from the end", "[ops][indexing]") {
  check({"index_fill from the end", {fractions({6, 4})},
         [](const Tensors& in) { return Tensors{in[0].index_fill(0, torch::tensor({-1, 2}), 5)}; }});
}
