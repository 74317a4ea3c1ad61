// Every pair of placements against the plain tensor, and which collectives they take.
#include "tests/support/redistribute_support.hpp"

#include <dtensor/comm/event.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <fmt/ranges.h>
#include <range/v3/view/cartesian_product.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Moves this rank's shard and compares bitwise; a partial result by moving it on to replicated.
void check_move(const at::Tensor& whole, const LayoutPtr& from, const LayoutPtr& to) {
  const auto& mesh = from->mesh();
  const auto local = local_tensor(whole, *from, mesh.coordinate());
  const auto before = local.clone();
  auto moved = move_local(local, from, to).get();
  require(at::equal(local, before), "test", "{} -> {} wrote to its input", from->str(), to->str());
  require(moved.sizes() == to->local_sizes() && moved.scalar_type() == to->dtype(), "test", "{} -> {}: wrong shape",
          from->str(), to->str());
  auto goal = to;
  if (to->has_partial()) {
    goal = to->with(Placements(mesh.ndim(), replicate()));
    moved = move_local(moved, to, goal).get();
  }
  require(at::equal(moved, local_tensor(whole, *goal, mesh.coordinate())), "test", "{} -> {}: wrong values; plan {}",
          from->str(), to->str(), plan_move(from, to).str());
}

void check_all_pairs(const Shape& mesh_sizes, const std::vector<Shape>& shapes, at::ScalarType dtype,
                     const std::vector<Placement>& choices, const std::string& transport = "threads") {
  int ranks = 1;
  for (int64_t n : mesh_sizes) ranks *= static_cast<int>(n);
  on_ranks(
      ranks,
      [&](World&) {
        const auto mesh = init_device_mesh(c10::kCPU, mesh_sizes);
        for (const auto& shape : shapes) {
          const auto whole = global_tensor(shape, dtype);
          const auto all = layouts(mesh, choices, whole);
          for (const auto& [from, to] : ranges::views::cartesian_product(all, all)) check_move(whole, from, to);
        }
      },
      transport);
}

const std::vector<Shape> kShapes{{12, 3}, {13, 3}, {14, 3}, {1, 5}, {0, 4}};
const std::vector<Placement> kCuts{replicate(),
                                   shard(0),
                                   shard(1),
                                   strided_shard(0, 2),
                                   strided_shard(0, 3),
                                   strided_shard(0, 1, 2),
                                   strided_shard(0, 2, 3),
                                   strided_shard(1, 3),
                                   // Shares fit meshes of as many ranks.
                                   ragged_shard(0, {2, 1}),
                                   ragged_shard(0, {0, 1}, 2),
                                   ragged_shard(0, {3, 0, 1}),
                                   ragged_shard(0, {1, 2, 2}, 2),
                                   ragged_shard(1, {0, 2, 1}),
                                   ragged_shard(0, {1, 0, 5, 2}),
                                   flat(40),
                                   flat(33, 7)};

std::vector<Placement> with(std::vector<Placement> choices, std::initializer_list<ReduceOp> ops) {
  for (auto op : ops) choices.push_back(partial(op));
  return choices;
}

class Counter final : public comm::Observer {
 public:
  Counter() : Observer(World::current().local<comm::Events>()) {}
  ~Counter() override { stop_observing(); }
  void on_issue(const comm::Event& event) override {
    text += fmt::format("{}{} on {}", text.empty() ? "" : ", ", comm::name(event.kind), std::string_view(event.group));
    bytes += event.bytes;
  }
  std::string text;
  int64_t bytes = 0;
};

// The collectives that a move takes, in order.
std::string collectives(const DeviceMesh& mesh, const Shape& shape, Placements from, Placements to) {
  const auto before = Layout::get(mesh, from, shape, at::kFloat), after = before->with(to);
  const auto local = local_tensor(global_tensor(shape, at::kFloat), *before, mesh.coordinate());
  Counter counter;
  move_local(local, before, after).get();
  return counter.text;
}

}  // namespace

TEST_CASE("every pair of placements on a line of ranks", "[redistribute]") {
  using enum ReduceOp;
  for (int64_t ranks : {1, 2, 3, 4}) {
    REQUIRE_NOTHROW(check_all_pairs({ranks}, kShapes, at::kFloat, with(kCuts, {sum, avg, product, min, max, norm2})));
    REQUIRE_NOTHROW(check_all_pairs({ranks}, kShapes, at::kLong, with(kCuts, {sum, product, min, max})));
    REQUIRE_NOTHROW(check_all_pairs({ranks}, kShapes, at::kBFloat16, with(kCuts, {sum, max})));
    REQUIRE_NOTHROW(check_all_pairs({ranks}, kShapes, at::kBool, with(kCuts, {sum, product, min, max})));
  }
}

TEST_CASE("every pair of placements of a 3-D tensor with its middle dimension cut", "[redistribute]") {
  REQUIRE_NOTHROW(check_all_pairs({3}, {{2, 12, 3}, {4, 6, 1}, {3, 12, 0}}, at::kFloat,
                                  {replicate(), shard(0), shard(1), shard(2), strided_shard(1, 2), strided_shard(1, 3, 2), partial(),
                                   ragged_shard(1, {1, 0, 2}), flat(90, 1)}));
}

TEST_CASE("every pair of placements on a 2-D mesh", "[redistribute]") {
  using enum ReduceOp;
  const std::vector<Placement> choices{replicate(), shard(0), shard(1), strided_shard(0, 3), strided_shard(0, 1, 2),
                                       partial(),   ragged_shard(0, {1, 3}), ragged_shard(0, {2, 0, 1}), flat(60, 5)};
  REQUIRE_NOTHROW(check_all_pairs({2, 2}, {{12, 3}, {13, 5}}, at::kFloat, choices));
  REQUIRE_NOTHROW(check_all_pairs({2, 3}, {{12, 3}}, at::kLong, choices));
}

TEST_CASE("partial operations that do not commute nest", "[redistribute]") {
  using enum ReduceOp;
  REQUIRE_NOTHROW(
      check_all_pairs({2, 2}, {{5}}, at::kFloat, with({replicate(), shard(0)}, {sum, avg, product, max, norm2})));
}

TEST_CASE("every pair of placements on a 3-D mesh with a dimension of one", "[redistribute]") {
  REQUIRE_NOTHROW(check_all_pairs({1, 2, 2}, {{14, 3}}, at::kFloat, {replicate(), shard(0), partial()}));
}

TEST_CASE("every pair of placements over gloo where collectives are under way when a move returns",
          "[redistribute][gloo]") {
  using enum ReduceOp;
  try {
    on_ranks(
        1, [](World&) {}, "gloo");
  } catch (const Error& error) {
    const std::string why = error.what_without_backtrace();
    if (why.find("no gloo transport") == std::string::npos) throw;
    DTENSOR_SKIP(why);
  }
  REQUIRE_NOTHROW(
      check_all_pairs({3}, {{12, 3}, {13, 3}, {1, 5}}, at::kFloat, with(kCuts, {sum, avg, max, norm2}), "gloo"));
  REQUIRE_NOTHROW(check_all_pairs({2, 2}, {{13, 3}}, at::kLong, {replicate(), shard(0), shard(1), partial()}, "gloo"));
}

TEST_CASE("local tensors may have any strides", "[redistribute]") {
  REQUIRE_NOTHROW(on_ranks(3, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {3});
    const auto whole = global_tensor({7, 6, 5}, at::kFloat);
    for (const auto& from : layouts(mesh, {replicate(), shard(0), shard(2), strided_shard(1, 2), partial()}, whole)) {
      for (const auto& to : layouts(
               mesh, {replicate(), shard(0), shard(1), shard(2), strided_shard(1, 2), strided_shard(1, 3)}, whole)) {
        const auto local = local_tensor(whole, *from, mesh.coordinate());
        const auto want = local_tensor(whole, *to, mesh.coordinate());
        const auto transposed = local.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
        auto sparse =
            at::empty({local.size(0), local.size(1), local.size(2) * 2}, local.options()).slice(2, 0, c10::nullopt, 2);
        sparse.copy_(local);
        for (const auto& odd : {transposed, sparse}) {
          require(at::equal(move_local(odd, from, to).get(), want), "test", "{} -> {} of a strided tensor", from->str(),
                  to->str());
        }
      }
    }
  }));
}

TEST_CASE("a move takes the collectives it needs and no more", "[redistribute]") {
  REQUIRE_NOTHROW(on_ranks(4, [](World&) {
    const auto expect = [](const std::string& got, const std::string& want) {
      require(got == want, "test", "got \"{}\"; expected \"{}\"", got, want);
    };
    const auto line = init_device_mesh(c10::kCPU, {4}, {"x"});
    const Placement r = replicate(), s0 = shard(0), s1 = shard(1), p = partial();
    expect(collectives(line, {13, 5}, {s0}, {r}), "all_gather on x");
    expect(collectives(line, {13, 5}, {s1}, {r}), "all_gather on x");
    expect(collectives(line, {13, 5}, {p}, {s0}), "reduce_scatter on x");
    expect(collectives(line, {13, 5}, {p}, {s1}), "reduce_scatter on x");
    expect(collectives(line, {13, 5}, {p}, {r}), "all_reduce on x");
    expect(collectives(line, {13, 5}, {s0}, {s1}), "all_to_all on x");
    expect(collectives(line, {12, 5}, {s0}, {strided_shard(0, 3)}), "all_to_all on x");
    expect(collectives(line, {13, 5}, {r}, {s0}), "");
    expect(collectives(line, {13, 5}, {r}, {p}), "");
    expect(collectives(line, {13, 5}, {s0}, {p}), "all_gather on x");
    expect(collectives(line, {13, 5}, {p}, {partial(ReduceOp::max)}), "all_reduce on x");
    expect(collectives(line, {13, 5}, {s0}, {s0}), "");

    const auto thin = init_device_mesh(c10::kCPU, {1, 4}, {"one", "x"});
    for (const auto& from : {r, s0, s1, p, strided_shard(1, 5)}) {
      for (const auto& to : {r, s0, s1, p, strided_shard(1, 5)})
        expect(collectives(thin, {13, 5}, {from, r}, {to, r}), "");
    }
    const auto square = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
    expect(collectives(square, {12, 4}, {s0, s1}, {s0, r}), "all_gather on tp");
    expect(collectives(square, {12, 4}, {s0, p}, {s0, s1}), "reduce_scatter on tp");
    expect(collectives(square, {12, 4}, {p, p}, {r, r}), "all_reduce on dp+tp");
    expect(collectives(square, {13, 4}, {s0, s0}, {r, r}), "all_gather on dp+tp");
    expect(collectives(square, {13, 4}, {p, p}, {s0, s0}), "reduce_scatter on dp+tp");
    expect(collectives(square, {12, 4}, {s0, r}, {s0, s0}), "");
    expect(collectives(square, {12, 4}, {s0, r}, {s0, s1}), "");
  }));
}

TEST_CASE("collectives carry exact sizes", "[redistribute]") {
  REQUIRE_NOTHROW(on_ranks(4, [](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {4});
    const auto from = Layout::get(mesh, Placements{shard(0)}, {5, 3}, at::kFloat);
    const auto local = local_tensor(global_tensor({5, 3}, at::kFloat), *from, mesh.coordinate());
    Counter counter;
    move_local(local, from, from->with({replicate()})).get();
    const int64_t rows[] = {2, 2, 1, 0};
    require(counter.bytes == rows[world.rank()] * 12, "test", "got {} bytes", counter.bytes);
  }));
}

TEST_CASE("a chunk is a view and a gather along the first dimension is in place", "[redistribute]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto whole = global_tensor({6, 4}, at::kFloat);
    const auto replicated = Layout::get(mesh, Placements{replicate()}, {6, 4}, at::kFloat);
    const auto columns = replicated->with({shard(1)}), rows = replicated->with({shard(0)});
    const auto part = move_local(whole, replicated, columns).get();
    require(part.data_ptr() == whole.data_ptr<float>() + 2 * world.rank(), "test", "the chunk was copied");
    require(move_local(whole, rows->with({replicate()}), replicated).get().is_same(whole), "test",
            "no move is no copy");
    const auto gathered = move_local(whole.narrow(0, 3 * world.rank(), 3), rows, replicated).get();
    require(at::equal(gathered, whole) && gathered.is_contiguous(), "test", "wrong gather");
  }));
}

TEST_CASE("pieces of a split cut lie in the memory order of the whole on every rank", "[redistribute]") {
  const auto pieces = [](int32_t split, std::initializer_list<int64_t> shares) { return shard(0, Cut{split, 1, Shares::of(shares)}); };
  REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {4});
    const auto row_major = global_tensor({10, 3}, at::kFloat), reversed = global_tensor({3, 10}, at::kFloat).t();
    for (const auto& whole : {row_major, reversed}) {
      for (const auto& cut : {strided_shard(0, 2), strided_shard(0, 5), pieces(2, {1, 1, 1, 1}), pieces(2, {0, 4, 1, 0}),
                              pieces(2, {0, 1, 0, 0})}) {
        const auto from = Layout::get(mesh, Placements{replicate()}, whole.sizes(), whole.strides(), at::kFloat), to = from->with({cut});
        const auto part = move_local(whole, from, to).get();
        require(part.equal(local_tensor(whole, *to, mesh.coordinate())), "test", "{}: other values", to->str());
        if (part.numel() == 0) continue;
        require(memory_order(part.strides()) == memory_order(whole.strides()) && part.is_non_overlapping_and_dense(), "test",
                "{}: sizes [{}] have the strides [{}]", to->str(), fmt::join(part.sizes(), ", "), fmt::join(part.strides(), ", "));
      }
    }
  }));
}

TEST_CASE("results may be pending and waiting twice or never is fine", "[redistribute]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2});
    const auto whole = global_tensor({6, 4}, at::kFloat);
    const auto replicated = Layout::get(mesh, Placements{replicate()}, {6, 4}, at::kFloat);
    const auto columns = replicated->with({shard(1)});
    auto pending = move_local(whole.narrow(1, 2 * world.rank(), 2), columns, replicated);
    if (pending.work) {
      pending.work->wait();
      pending.work->wait();
      require(pending.work->done(), "test", "not done after wait");
    }
    require(at::equal(pending.tensor, whole), "test", "wrong values");
    move_local(whole.narrow(1, 2 * world.rank(), 2), columns, replicated);
    world.barrier();
  }));
}
