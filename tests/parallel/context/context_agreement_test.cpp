// What ranks of a context-parallel group find out together: predicates that fail on one of them, plans that differ, documents that no mask
// reads, lengths that were ordered.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/nn/attention.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

const std::vector<std::string> kTransports{"threads", "shm", "gloo"};

void throws_with(const std::string& text, const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return require(says(text).match(error.what()), "test", "it says: {}", error.what());
  }
  fail("test", "it was taken: {}", text);
}

at::Tensor numbers(int64_t length) {
  const NoSpmd plain;
  return at::arange(4 * length * 2, at::kDouble).sin().view({1, 4, length, 2});
}

// Queries, keys and values that this rank has, and how the ranks are to call.
struct PlainCall {
  AttentionMask mask = AttentionMask::causal();
  PackedSequence sequence{16};
  std::vector<context::Positions> rows = context::zigzag_order(16, 4);
  ContextAttentionOptions options{};

  at::Tensor operator()(const DeviceMesh& mesh) const {
    const ContextPlan plan(mask, {sequence}, rows);
    const auto own = numbers(16).index_select(2, at::tensor(rows[mesh.world().rank()], at::kLong));
    return context_attention(own, own, own, plan, mesh, options);
  }
};

// Calls of which rank 2 has another one, of the same sizes, and what is said of it.
std::vector<std::pair<std::string, PlainCall>> other_calls() {
  std::vector<std::pair<std::string, PlainCall>> others;
  const auto add = [&](const std::string& text, auto change) { change(others.emplace_back(text, PlainCall{}).second); };
  add("have another mask (here: ", [](PlainCall& call) { call.mask = AttentionMask::causal_sliding_window(3); });
  add("have other documents", [](PlainCall& call) { call.sequence = PackedSequence({5, 11}); });
  add("have other rows in their plan", [](PlainCall& call) { std::swap(call.rows[2], call.rows[3]); });
  add("have another dropout or seed of it", [](PlainCall& call) { call.options.dropout = {.probability = 0.5, .seed = 8}; });
  add("have another scale", [](PlainCall& call) { call.options.scale = 0.25; });
  add("have another method", [](PlainCall& call) { call.options.method = "allgather"; });
  return others;
}

}  // namespace

TEST_CASE("context agreement: a predicate that throws on one rank alone is an error on every rank", "[context][errors]") {
  for (const auto& transport : kTransports) {
    for (const std::string method : {"automatic", "ring", "ulysses"}) {
      for (const std::string order : {"zigzag", "balanced"}) {
        CAPTURE(transport, method, order);
        REQUIRE_NOTHROW(on_ranks(
            4,
            [&](World& world) {
              const auto mesh = init_device_mesh(c10::kCPU, {4}, {"cp"});
              const auto unwell = [&](int64_t q, int64_t k, int64_t, int64_t) {
                if (world.rank() == 2) throw std::runtime_error("rank 2 is unwell");
                return k <= q;
              };
              const auto run = [&](const AttentionMask& mask) {
                ContextParallel context(mesh, "cp", {.method = method, .order = order, .mask = mask});
                const auto x = distribute_tensor(context.order(numbers(300), 2), mesh, {shard(2)}).tensor();
                return context.restore(full_tensor(nn::attention(x, x, x)), 2);
              };
              const auto text = world.rank() == 2 ? "rank 2 is unwell" : "the predicate of the mask 'unwell' threw on rank 2 of the mesh";
              throws_with(text, [&] { run(AttentionMask::from(unwell, "unwell")); });
              const auto well = run(AttentionMask::from([](int64_t q, int64_t k, int64_t, int64_t) { return k <= q; }));
              require(well.allclose(run(AttentionMask::causal()), 1e-10, 1e-12), "test", "what follows differs");
            },
            transport));
      }
    }
  }
}

// The same plan under another method, which asks for more pairs.
TEST_CASE("context agreement: a plan that answered one method is asked by automatic", "[context][errors]") {
  REQUIRE_NOTHROW(on_ranks(4, [](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {4}, {"cp"});
    const auto rows = context::contiguous_order(16, 4);
    const auto mask = AttentionMask::from([&](int64_t q, int64_t k, int64_t, int64_t) {
      if (world.rank() == 2 && q < 8 && k < 8) throw std::runtime_error("not mine");
      return k <= q;
    });
    const ContextPlan plan(mask, {PackedSequence(16)}, rows);
    const auto own = numbers(16).narrow(2, 4 * world.rank(), 4);
    context_attention(own, own, own, plan, mesh);
    throws_with(world.rank() == 2 ? "not mine" : "threw on rank 2", [&] {
      context_attention(own, own, own, plan, mesh, {.method = "automatic"});
    });
  }));
}

TEST_CASE("context agreement: ranks that differ are told apart when a plan is first used", "[context][errors]") {
  for (const auto& transport : kTransports) {
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](World& world) {
          const auto mesh = init_device_mesh(c10::kCPU, {4}, {"cp"});
          const PlainCall usual;
          const auto expected = usual(mesh);
          for (const auto& [text, other] : other_calls()) {
            throws_with("ranks 2 " + text, [&, &other = other] { world.rank() == 2 ? other(mesh) : usual(mesh); });
            require(usual(mesh).equal(expected), "test", "what follows differs");
          }
          const auto own = AttentionMask::from([](int64_t q, int64_t k, int64_t, int64_t) { return k <= q; },
                                               fmt::format("of rank {}", world.rank()));
          require(PlainCall{.mask = own}(mesh).allclose(expected, 1e-10, 1e-12), "test", "predicates go by their kind");
          set_replication_check(false);
          const bool is_third = world.rank() == 2;
          PlainCall{.mask = is_third ? AttentionMask::causal_documents() : AttentionMask::causal()}(mesh);
          set_replication_check(true);
        },
        transport));
  }
}

TEST_CASE("context agreement: documents that no mask reads are refused", "[context][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
    const std::vector<PackedSequence> two{PackedSequence(16), PackedSequence({5, 11})};
    {
      ContextParallel context(mesh, "cp");
      throws_with("got 2 documents, and attention without .mask does not go by documents", [&] { context.pack(two); });
      throws_with("got 2 documents", [&] { context.pack(PackedSequence({5, 3}), {{0, 1, 2, 3, 4}, {5, 6, 7}}); });
      context.pack({PackedSequence(16)});
      context.pack(PackedSequence(8), {{0, 1, 2, 3, 4}, {5, 6, 7}});
    }
    for (const auto& mask : {AttentionMask::full(), AttentionMask::sliding_window(3, 3), AttentionMask::prefix_lm(3),
                             AttentionMask::causal_sliding_window(3), AttentionMask::global_sliding_window(1, 3, 3)}) {
      ContextParallel context(mesh, "cp", {.mask = mask});
      throws_with(fmt::format("the mask {} does not go by documents", mask.name()), [&] { context.pack(two); });
    }
    for (const auto& mask : {AttentionMask::documents(), AttentionMask::shared_question(), AttentionMask::causal_blocks(),
                             AttentionMask::block_causal_documents(3), AttentionMask::prefix_lm_documents({1, 2}),
                             AttentionMask::from([](int64_t, int64_t, int64_t a, int64_t b) { return a == b; })}) {
      ContextParallel context(mesh, "cp", {.mask = mask});
      context.pack(two);
    }
  }));
}

// As the page on long sequences shows it.
TEST_CASE("context agreement: a batch that is ordered as one carries its numbers", "[context]") {
  for (const auto& transport : kTransports) {
    REQUIRE_NOTHROW(on_ranks(
        4,
        [](World&) {
          const auto ids = at::arange(26, at::kLong).view({2, 13}), targets = ids + 1;
          const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "cp"});
          const Spmd spmd(mesh);
          ContextParallel context(mesh, "cp");
          const auto positions = at::arange(ids.size(1)).expand_as(ids);
          const auto batch = context.order(at::stack({ids, targets, positions}), /*dim=*/2);
          const auto on_mesh = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0), shard(1)}).tensor(); };
          context.check_positions(on_mesh(batch[2]));
          throws_with("it was never ordered", [&] { context.check_positions(on_mesh(full_tensor(positions))); });
          const NoSpmd plain;
          require(context.restore(full_tensor(on_mesh(batch[1]))).equal(targets), "test", "other targets");
        },
        transport));
  }
}

TEST_CASE("context agreement: every length that was ordered is remembered", "[context]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
    ContextParallel context(mesh, "cp");
    std::vector<at::Tensor> all;
    for (int64_t length = 8; length < 48; ++length) {
      all.push_back(distribute_tensor(context.order(numbers(length), 2), mesh, {shard(2)}).tensor());
    }
    for (const auto& x : all) nn::attention(x, x, x, {.causal = true});
    const auto never = distribute_tensor(numbers(50), mesh, {shard(2)}).tensor();
    throws_with("no batch of 50 positions was ordered", [&] { nn::attention(never, never, never); });
    context.pack({PackedSequence(8)});
    throws_with("no batch of 8 positions was ordered", [&] { nn::attention(all[0], all[0], all[0]); });
  }));
}

TEST_CASE("context agreement: a plan has no other ranks than its own", "[context][errors]") {
  const ContextPlan plan(AttentionMask::causal(), {PackedSequence(16)}, context::zigzag_order(16, 2));
  for (const int rank : {-1, 2, 3}) {
    const auto text = fmt::format("there is no rank {} of 2; expected 0 to 1", rank);
    CHECK_THROWS_WITH(plan.rows(rank), says(text));
    CHECK_THROWS_WITH(plan.length(rank), says(text));
    CHECK_THROWS_WITH(plan.cells(rank), says(text));
    CHECK_THROWS_WITH(plan.meet(0, rank), says(text));
    CHECK_THROWS_WITH(plan.masks(rank, 0), says(text));
    CHECK_THROWS_WITH(plan.places_in_group(rank, 1), says(text));
  }
  for (int again = 0; again < 2; ++again) CHECK(plan.cells(0) == 68);
}

TEST_CASE("context agreement: a scale that is no number is refused", "[context][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
    const ContextPlan plan(AttentionMask::causal(), {PackedSequence(16)}, context::contiguous_order(16, 2));
    const auto x = numbers(8);
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    for (const double scale : {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity}) {
      throws_with("expected a finite number; hint: 0 is 1 / sqrt(dim)", [&] {
        context_attention(x, x, x, plan, mesh, {.scale = scale});
      });
    }
  }));
}
