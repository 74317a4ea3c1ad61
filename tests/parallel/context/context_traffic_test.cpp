// What methods of attention over cut sequences send, on every transport; and what they refuse.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/observe/comm_debug.hpp>
#include <dtensor/parallel/context/attention.hpp>

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kBatch = 2, kRows = 4, kDim = 3;

struct Run {
  double forward = 0, backward = 0;  // elements that this rank sent to others
  at::Tensor out, dk;
};

// Elements of 8 bytes that went to other ranks; of what all give to all, a share stays.
double elements_sent(const CommDebugMode& counted, int ranks) {
  using comm::Collective;
  const double others = ranks - 1;
  const auto of = [&](Collective kind) { return static_cast<double>(counted.bytes(kind)) / 8; };
  return of(Collective::send) + of(Collective::all_gather) * others + of(Collective::reduce_scatter) * others / ranks +
         of(Collective::all_to_all) * others / ranks;
}

Run run(const std::string& method, const ContextPlan& plan, const DeviceMesh& mesh, int64_t heads, int64_t key_heads) {
  const NoSpmd plain;
  const int rank = context::Ranks({plan, mesh}).rank();
  const auto rows = at::tensor(plan.rows(rank), at::kLong);
  const auto leaf = [&](int64_t h, int seed) {
    torch::manual_seed(seed);
    return torch::randn({kBatch, h, plan.length(), kDim}, at::kDouble).index_select(2, rows).requires_grad_();
  };
  const auto q = leaf(heads, 1), k = leaf(key_heads, 2), v = leaf(key_heads, 3);
  Run result;
  {
    CommDebugMode counted;
    result.out = context_attention(q, k, v, plan, mesh, {.method = method});
    result.forward = elements_sent(counted, plan.ranks());
  }
  CommDebugMode counted;
  result.out.sum().backward();
  result.backward = elements_sent(counted, plan.ranks());
  result.out = result.out.detach();
  result.dk = k.grad();
  return result;
}

}  // namespace

TEST_CASE("context traffic: ranks send what the formulas say", "[context]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 4}) {
      CAPTURE(transport, ranks);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"cp"});
            const ContextPlan plan(AttentionMask::full(), {PackedSequence(kRows * ranks)}, context::contiguous_order(kRows * ranks, ranks));
            constexpr double kHeads = 8, kKeyHeads = 4, n = kBatch * kRows;
            const double others = ranks - 1, keys = 2 * n * kKeyHeads * kDim;
            const auto check = [&](const char* method, double forward, double backward) {
              const auto got = run(method, plan, mesh, 8, 4);
              require(got.forward == forward && got.backward == backward, "test", "{} sent {} and {}; expected {} and {}", method,
                      got.forward, got.backward, forward, backward);
            };
            check("ring", keys * others, 2 * keys * others);
            check("allgather", keys * others, 2 * keys * others);
            const double traded = others / ranks * n * kDim * (2 * kHeads + 2 * kKeyHeads);
            check("ulysses", traded, traded);
            if (ranks > 1) {
              const auto hosts = init_device_mesh(c10::kCPU, {2, ranks / 2}, {"far", "near"});
              const double within = 2 * (ranks / 2 - 1), blocks = keys * (1 + within);
              const auto got = run("doublering", plan, hosts, 8, 4);
              require(got.forward == blocks && got.backward == 2 * blocks, "test", "doublering sent {} and {}; expected {} and {}",
                      got.forward, got.backward, blocks, 2 * blocks);
            }
            check("tokenring", n * kHeads * (2 * kDim + 1) * others, n * kHeads * (3 * kDim + 2) * others);
          },
          transport));
    }
  }
}

TEST_CASE("context traffic: nothing is sent that no query sees", "[context]") {
  // The documents end where the ranks' rows do, but for the second one: it has a row of rank 1.
  const PackedSequence packed({4, 5, 3, 4});
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](World& world) {
          const auto mesh = init_device_mesh(c10::kCPU, {4}, {"cp"});
          const ContextPlan plan(AttentionMask::causal_documents(), {packed}, context::contiguous_order(16, 4));
          const double block = 2 * kBatch * kRows * 2 * kDim;  // keys and values of a rank
          const auto ring = run("ring", plan, mesh, 2, 2);
          require(ring.forward == (world.rank() == 1 ? block : 0), "test", "forward sent {}", ring.forward);
          require(ring.backward == (world.rank() == 1 || world.rank() == 2 ? block : 0), "test", "backward sent {}", ring.backward);
          const auto token_ring = run("tokenring", plan, mesh, 2, 2);
          const double queries = kBatch * kRows * 2 * kDim;
          const auto expected = world.rank() == 2 ? queries : world.rank() == 1 ? queries + queries / kDim : 0;
          require(token_ring.forward == expected, "test", "forward sent {}", token_ring.forward);
        },
        transport));
  }
}

// The ring works on its own block first, and one device on the first one: what two blocks give does not depend on their order.
TEST_CASE("context attention: a ring of two ranks has the bits of one device that takes the same two blocks", "[context]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](World& world) {
          const NoSpmd plain;
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
          torch::manual_seed(5);
          const auto q = torch::randn({1, 2, 40, 4}), k = torch::randn({1, 2, 40, 4}), v = torch::randn({1, 2, 40, 4});
          const ContextPlan plan(AttentionMask::causal(), {PackedSequence(40)}, context::contiguous_order(40, 2));
          const auto half = [&](const at::Tensor& x, int r) { return x.narrow(2, 20 * r, 20); };
          const int r = world.rank();
          const auto own = context_attention(half(q, r), half(k, r), half(v, r), plan, mesh);
          context::AttentionCall first{plan.masks(r, 0), 0.5}, second{plan.masks(r, 1), 0.5};
          auto expected = context::block_attention(half(q, r), half(k, 0), half(v, 0), first);
          context::merge(expected, context::block_attention(half(q, r), half(k, 1), half(v, 1), second));
          require(own.equal(expected.out), "test", "another output");
        },
        transport));
  }
}

TEST_CASE("context attention: methods and transports give the same values; ranks may have no rows and no heads", "[context]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const std::string method : {"ring", "doublering", "allgather", "ulysses", "tokenring", "usp", "automatic"}) {
      for (const int64_t length : {2, 7, 26}) {
        CAPTURE(transport, method, length);
        REQUIRE_NOTHROW(on_ranks(
            4,
            [&](World& world) {
              const auto flat = init_device_mesh(c10::kCPU, {4}, {"cp"});
              const bool takes_two = method == "usp" || method == "doublering";
              const auto mesh = takes_two ? init_device_mesh(c10::kCPU, {2, 2}, {"far", "near"}) : flat;
              const auto mask = AttentionMask::causal_sliding_window(5);
              const ContextPlan plan(mask, {PackedSequence(length)}, context::contiguous_order(length, 4));
              const ContextPlan alone(mask, {PackedSequence(length)}, context::contiguous_order(length, 1));
              const DeviceMesh self(c10::kCPU, {world.rank()}, {1}, {"self"});
              const auto got = run(method, plan, mesh, 3, 1), whole = run("ring", alone, self, 3, 1);
              const auto rows = at::tensor(plan.rows(world.rank()), at::kLong);
              require(got.out.allclose(whole.out.index_select(2, rows), 1e-12, 1e-12), "test", "another output");
              require(got.dk.allclose(whole.dk.index_select(2, rows), 1e-12, 1e-12), "test", "another gradient");
            },
            transport));
      }
    }
  }
}

TEST_CASE("context attention: it keeps float32 under autocast and its gradient has none", "[context]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const NoSpmd plain;
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
    const ContextPlan plan(AttentionMask::causal(), {PackedSequence(8)}, context::contiguous_order(8, 2));
    for (const std::string method : {"ring", "allgather", "ulysses", "tokenring"}) {
      const auto run = [&] {
        torch::manual_seed(1);
        const auto x = torch::randn({1, 2, 4, 3}).requires_grad_();
        const auto y = context_attention(x, x * 2, x, plan, mesh, {.method = method});
        return torch::autograd::grad({y.sum()}, {x})[0];
      };
      const auto expected = run();
      const c10::impl::IncludeDispatchKeyGuard autocast(c10::DispatchKey::AutocastCPU);
      require(run().equal(expected), "test", "{}: another gradient", method);
    }
    const auto x = torch::ones({1, 2, 4, 3}).requires_grad_();
    try {
      torch::autograd::grad({context_attention(x, x, x, plan, mesh).sum()}, {x}, {}, true, /*create_graph=*/true);
    } catch (const c10::Error& error) {
      return require(says("its gradient has none").match(error.what()), "test", "it says: {}", error.what());
    }
    fail("test", "a gradient of a gradient was taken");
  }));
}

TEST_CASE("context attention: what does not fit is refused on every rank", "[context][errors]") {
  const auto refused = [](const std::string& text, const std::function<void(const ContextPlan&, const DeviceMesh&)>& call) {
    CAPTURE(text);
    REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
      const NoSpmd plain;
      const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
      const ContextPlan plan(AttentionMask::causal(), {PackedSequence(8)}, context::contiguous_order(8, 2));
      try {
        call(plan, mesh);
      } catch (const c10::Error& error) {
        return require(says(text).match(error.what()), "test", "it says: {}", error.what());
      }
      fail("test", "it was taken");
    }));
  };
  const auto x = [](std::vector<int64_t> sizes) { return torch::ones(sizes); };
  refused("there is no method 'pigeon'; expected one of ring, doublering", [&](const auto& plan, const auto& mesh) {
    context_attention(x({1, 2, 4, 3}), x({1, 2, 4, 3}), x({1, 2, 4, 3}), plan, mesh, {.method = "pigeon"});
  });
  refused("got sizes [1, 2, 5, 3]; expected [batch, heads, rows, dim] with the 4 rows", [&](const auto& plan, const auto& mesh) {
    context_attention(x({1, 2, 5, 3}), x({1, 2, 4, 3}), x({1, 2, 4, 3}), plan, mesh);
  });
  refused("got 3 heads and 2 key heads", [&](const auto& plan, const auto& mesh) {
    context_attention(x({1, 3, 4, 3}), x({1, 2, 4, 3}), x({1, 2, 4, 3}), plan, mesh);
  });
  refused("got Float and Double", [&](const auto& plan, const auto& mesh) {
    context_attention(x({1, 2, 4, 3}), x({1, 2, 4, 3}).to(at::kDouble), x({1, 2, 4, 3}).to(at::kDouble), plan, mesh);
  });
  refused("expected one batch and dim, and k like v", [&](const auto& plan, const auto& mesh) {
    context_attention(x({1, 2, 4, 3}), x({1, 2, 4, 3}), x({1, 2, 4, 2}), plan, mesh);
  });
  refused("usp takes a mesh of two dimensions", [&](const auto& plan, const auto& mesh) {
    context_attention(x({1, 2, 4, 3}), x({1, 2, 4, 3}), x({1, 2, 4, 3}), plan, mesh, {.method = "usp"});
  });
  refused("doublering takes a mesh of two dimensions", [&](const auto& plan, const auto& mesh) {
    context_attention(x({1, 2, 4, 3}), x({1, 2, 4, 3}), x({1, 2, 4, 3}), plan, mesh, {.method = "doublering"});
  });
  refused("the plan is of 1 ranks, and the mesh has 2", [&](const auto&, const auto& mesh) {
    const ContextPlan one(AttentionMask::causal(), {PackedSequence(4)}, context::contiguous_order(4, 1));
    context_attention(x({1, 2, 4, 3}), x({1, 2, 4, 3}), x({1, 2, 4, 3}), one, mesh);
  });
}
