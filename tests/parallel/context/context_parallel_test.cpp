// Models whose positions are cut: attention of dtensor/nn inside dt::ContextParallel, against one device.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/nn/position_rows.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/training/checkpoint.hpp>

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kWords = 13, kWidth = 16, kLength = 22;

// Ids [batch, length] -> scores [batch, length, words], by learned and rotary positions and two layers of grouped attention.
struct Small : torch::nn::Module {
  Small() {
    register_module("words", words);
    register_module("places", places);
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(register_module(fmt::format("block{}", i),
                                       nn::GroupedQueryAttention(nn::GroupedQueryAttentionOptions{kWidth, /*heads=*/4, /*kv_heads=*/2})));
    }
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids, bool recompute = false) {
    auto x = words(ids) + nn::position_rows(places->weight, ids.size(1));
    const auto table = nn::rotary_table(ids.size(1), kWidth / 4, {}, x);
    for (auto& block : blocks) {
      const auto run = [block = block.ptr(), table](const at::Tensor& y) { return y + block->forward(at::layer_norm(y, {kWidth}), table); };
      x = recompute ? checkpoint(run, x) : run(x);
    }
    return head(x);
  }
  torch::nn::Embedding words{kWords, kWidth}, places{40, kWidth};
  std::vector<nn::GroupedQueryAttention> blocks;
  torch::nn::Linear head{kWidth, kWords};
};

std::pair<at::Tensor, at::Tensor> batch(int64_t length = kLength) {
  const auto words = torch::arange(4 * (length + 1), at::kLong).mul(7).add(3).remainder(kWords).view({4, length + 1});
  auto targets = words.narrow(1, 1, length).clone();
  targets.masked_fill_(targets.eq(5), -100);  // some count for nothing
  return {words.narrow(1, 0, length), targets};
}

at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, kWords}), targets.reshape({-1}));
}

struct Told {
  double loss = 0;
  std::vector<at::Tensor> gradients;
  at::Tensor scores;
};

Told on_one_device() {
  torch::manual_seed(3);
  Small model;
  model.to(at::kDouble);
  const auto [ids, targets] = batch();
  const auto scores = model.forward(ids);
  const auto loss = loss_of(scores, targets);
  loss.backward();
  Told told{loss.item<double>(), {}, scores.detach()};
  for (const auto& parameter : model.parameters()) told.gradients.push_back(parameter.grad());
  return told;
}

void check_on(const DeviceMesh& mesh, const Placements& placements, const ContextParallelOptions& options, const Told& expected,
              bool recompute = false) {
  const Spmd spmd(mesh);
  torch::manual_seed(3);
  Small model;
  model.to(at::kDouble);
  ContextParallel context(mesh, "cp", options);
  auto [ids, targets] = [] {
    const NoSpmd plain;
    return batch();
  }();
  const auto input = distribute_tensor(context.order(ids), mesh, placements);
  const auto target = distribute_tensor(context.order(targets), mesh, placements);
  const auto scores = model.forward(input, recompute);
  const auto loss = loss_of(scores, target);
  loss.backward();
  const NoSpmd plain;
  require(std::abs(full_tensor(loss).item<double>() - expected.loss) < 1e-12, "test", "another loss");
  require(context.restore(full_tensor(scores).detach()).allclose(expected.scores, 1e-10, 1e-12), "test", "other scores");
  const auto parameters = model.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    require(full_tensor(parameters[i].grad()).allclose(expected.gradients[i], 1e-10, 1e-12), "test", "gradient {} differs", i);
  }
}

const Placements kAlongCp{shard(1)};

}  // namespace

TEST_CASE("context parallel: a model over cut positions has one device's numbers", "[context]") {
  const auto expected = on_one_device();
  const ContextParallelOptions all[] = {{"ring", "contiguous"},   {"ring", "zigzag"},        {"ring", "stripes"}, {"ring", "balanced"},
                                        {"allgather", "zigzag"},  {"ulysses", "contiguous"}, {"usp", "zigzag"},   {"tokenring", "zigzag"},
                                        {"doublering", "zigzag"}, {"automatic", "zigzag"}};
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 4}) {
      for (const auto& options : all) {
        if ((options.method == "usp" || options.method == "doublering") && ranks == 1) continue;
        if (transport != "threads" && (ranks != 2 || options.order == "stripes")) continue;
        CAPTURE(transport, ranks, options.method, options.order);
        const auto check = [&](World&) {
          check_on(init_device_mesh(c10::kCPU, {ranks}, {"cp"}), kAlongCp, options, expected, /*recompute=*/options.order == "zigzag");
        };
        REQUIRE_NOTHROW(on_ranks(ranks, check, transport));
      }
    }
  }
}

TEST_CASE("context parallel: beside other dimensions of a mesh", "[context]") {
  const auto expected = on_one_device();
  REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
    check_on(init_device_mesh(c10::kCPU, {2, 2}, {"dp", "cp"}), {shard(0), shard(1)}, {"ring", "zigzag"}, expected);
    check_on(init_device_mesh(c10::kCPU, {2, 2}, {"cp", "dp"}), {shard(1), shard(0)}, {"ulysses", "zigzag"}, expected);
  }));
}

TEST_CASE("context parallel: documents of each row of the batch", "[context]") {
  REQUIRE_NOTHROW(on_ranks(4, [&](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "cp"});
    const std::vector<PackedSequence> packed{PackedSequence({3, 9}), PackedSequence({5, 1, 6}), PackedSequence({12}),
                                             PackedSequence({6, 6})};
    torch::manual_seed(9);
    const auto random = [] { return torch::randn({4, 2, 12, 3}, at::kDouble); };
    const auto q = random(), k = random(), v = random();
    auto expected = torch::empty_like(q);
    for (int64_t b = 0; b < 4; ++b) {
      for (int64_t d = 0; d < packed[b].documents(); ++d) {
        const auto [begin, end] = packed[b].document(d);
        const auto own = [&, begin = begin, end = end](const at::Tensor& x) { return x.narrow(0, b, 1).narrow(2, begin, end - begin); };
        own(expected).copy_(nn::attention(own(q), own(k), own(v), {.causal = true}));
      }
    }
    ContextParallel context(mesh, "cp", {.mask = AttentionMask::causal_documents()});
    context.pack(packed);
    const auto on_mesh = [&](const at::Tensor& x) { return distribute_tensor(context.order(x, 2), mesh, {shard(0), shard(2)}).tensor(); };
    const auto y = context.restore(full_tensor(nn::attention(on_mesh(q), on_mesh(k), on_mesh(v), {.causal = true})), 2);
    require(y.allclose(expected, 1e-10, 1e-12), "test", "documents differ");
    // On one device, plain tensors.
    ContextParallel alone(DeviceMesh(c10::kCPU, {world.rank()}, {1}, {"cp"}), "cp", {.mask = AttentionMask::causal_documents()});
    alone.pack(packed);
    require(nn::attention(q, k, v, {.causal = true}).allclose(y, 1e-10, 1e-12), "test", "one device differs");
    const auto by_dp = [&](const at::Tensor& x) { return distribute_tensor(x, mesh["dp"], {shard(0)}).tensor(); };
    const auto z = full_tensor(nn::attention(by_dp(q), by_dp(k), by_dp(v), {.causal = true}));
    require(z.allclose(y, 1e-10, 1e-12), "test", "a batch that is cut differs");
  }));
}

// As tp does to queries whose heads it does not divide.
TEST_CASE("context parallel: positions that another dimension cuts too", "[context]") {
  for (const std::string transport : {"threads", "shm"}) {
    for (const bool first : {true, false}) {
      CAPTURE(transport, first);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World&) {
            const std::vector<std::string> names{first ? "cp" : "tp", first ? "tp" : "cp"};
            const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, names);
            torch::manual_seed(9);
            const auto q = torch::randn({2, 3, 20, 4}, at::kDouble), k = torch::randn({2, 3, 20, 4}, at::kDouble);
            const auto expected = nn::attention(q, k, k, {.causal = true});
            ContextParallel context(mesh, "cp");
            const auto cut = [&](const at::Tensor& x) {
              return distribute_tensor(context.order(x, 2), mesh, {shard(2), shard(2)}).tensor();
            };
            const auto a = cut(q), b = cut(k);
            const auto y = full_tensor(nn::attention(a, b, b, {.causal = true}));
            require(context.restore(y, 2).allclose(expected, 1e-10, 1e-12), "test", "another output");
          },
          transport));
    }
  }
}

// Of libtorch 1.13 it is a private one, with two results.
at::Tensor libtorchs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                     const c10::optional<at::Tensor>& mask = {}) {
#if __has_include(<ATen/ops/scaled_dot_product_attention.h>)
  return at::scaled_dot_product_attention(q, k, v, mask, 0, causal);
#else
  return std::get<0>(at::_scaled_dot_product_attention(q, k, v, mask, 0, false, causal));
#endif
}

TEST_CASE("context parallel: libtorch's scaled_dot_product_attention takes part", "[context]") {
  for (const std::string transport : {"threads", "shm"}) {
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
          torch::manual_seed(9);
          const auto leaf = [] { return torch::randn({2, 2, 12, 3}, at::kDouble).requires_grad_(); };
          const auto q = leaf(), k = leaf(), v = leaf();
          const auto y = libtorchs(q, k, v, /*causal=*/true);
          const auto expected = torch::autograd::grad({y.square().sum()}, {q, k, v});
          ContextParallel context(mesh, "cp");
          const auto on_mesh = [&](const at::Tensor& x) {
            return distribute_tensor(context.order(x.detach(), 2), mesh, {shard(2)}).tensor().detach().requires_grad_();
          };
          const auto a = on_mesh(q), b = on_mesh(k), c = on_mesh(v);
          const auto z = libtorchs(a, b, c, /*causal=*/true);
          const auto got = torch::autograd::grad({z.square().sum()}, {a, b, c});
          const auto whole = [&](const at::Tensor& x) { return context.restore(full_tensor(x).detach(), 2); };
          require(whole(z).allclose(y, 1e-10, 1e-12), "test", "another output");
          for (int i = 0; i < 3; ++i) require(whole(got[i]).allclose(expected[i], 1e-10, 1e-12), "test", "gradient {} differs", i);
          try {
            libtorchs(a, b, c, false, torch::ones({12, 12}, at::kBool));
          } catch (const c10::Error& error) {
            return require(says("scaled_dot_product_attention got a mask").match(error.what()), "test", "it says: {}", error.what());
          }
          fail("test", "a mask by rows was taken");
        },
        transport));
  }
}

TEST_CASE("context parallel: a batch in another order is refused", "[context][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
    const auto refused = [](const std::string& text, const std::function<void()>& call) {
      try {
        call();
      } catch (const c10::Error& error) {
        return require(says(text).match(error.what()), "test", "it says: {}", error.what());
      }
      fail("test", "it was taken: {}", text);
    };
    refused("there is no method 'pigeon'", [&] { ContextParallel context(mesh, "cp", {.method = "pigeon"}); });
    refused("there is no order 'pigeon'", [&] { ContextParallel context(mesh, "cp", {.order = "pigeon"}); });
    refused("3 neighbours of 2 ranks", [&] { ContextParallel context(mesh, "cp", {.method = "usp", .neighbours = 3}); });
    refused("pigeon", [&] { ContextParallel context(mesh, "pigeon"); });
    const auto x = distribute_tensor(torch::ones({1, 1, 8, 2}), mesh, {shard(2)});
    {
      ContextParallel given(mesh, "cp", {.mask = AttentionMask::causal_documents()});
      given.pack(PackedSequence({5, 3}), {{0, 1, 2, 3, 4}, {5, 6, 7}});
      given.order(torch::arange(8).view({1, 8}));
      refused("hint: distribute ids by context.placement", [&] { nn::attention(x, x, x); });
    }
    ContextParallel context(mesh, "cp");
    refused("no batch of 8 positions was ordered; hint: give ids and targets to order()", [&] { nn::attention(x, x, x); });
    const auto ids = torch::arange(8).view({1, 8});
    const auto ordered = context.order(ids);
    require(ordered.equal(at::tensor({0, 1, 6, 7, 2, 3, 4, 5}, at::kLong).view({1, 8})), "test", "another order");
    require(context.restore(ordered).equal(ids), "test", "not restored");
    refused("is in this region's order already", [&] { context.order(ordered); });
    const auto plain = torch::ones({1, 1, 8, 2});
    refused("got plain queries, whose positions 'cp' does not cut", [&] { nn::attention(plain, plain, plain); });
    const auto whole = distribute_tensor(torch::ones({1, 1, 8, 2}), mesh, {replicate()});
    refused("whose positions 'cp' does not cut", [&] { nn::attention(whole, whole, whole); });
    refused("those of one sequence", [&] {
      const auto shorter = distribute_tensor(torch::ones({1, 1, 6, 2}), mesh, {shard(2)});
      context.order(ids);
      nn::attention(x, shorter, shorter);
    });
    {
      ContextParallel masked(mesh, "cp", {.order = "contiguous", .mask = AttentionMask::causal_documents()});
      refused("whose positions 'cp' does not cut", [&] { nn::attention(whole, whole, whole); });
      masked.order(ids);
      refused("got plain queries, whose positions 'cp' does not cut", [&] { nn::attention(plain, plain, plain); });
    }
    {
      const auto thrower = AttentionMask::from([](int64_t, int64_t, int64_t, int64_t) -> bool { throw std::runtime_error("no table"); });
      ContextParallel given(mesh, "cp", {.order = "contiguous", .mask = thrower});
      refused("'predicate' threw for query", [&] { nn::attention(x, x, x); });
    }
    const auto table = distribute_tensor(torch::ones({8, 2}), mesh, {replicate()}).tensor();
    refused("hint: work inside a dt::Spmd", [&] { nn::position_rows(table, 8); });
    {
      const Spmd spmd(mesh);
      require(context.order(torch::arange(8).view({1, 8})).equal(ordered), "test", "what Spmd made has another order");
    }
    context.pack({PackedSequence(7)});
    refused("a sequence of 8 positions, and documents of 7", [&] { context.order(ids); });
  }));
}
