// Silent faults of mixtures of experts that other libraries have had, each by name: with none of them do these tests pass.
#include "tests/support/experts_training.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/pipeline.hpp>

#include <unistd.h>

#include <filesystem>

namespace dtensor::test::experts {

namespace {

const nn::MoEOptions kBalanced = options_of([](auto& o) { o.balance_loss = 0.5, o.z_loss = 0.1; });

at::Tensor input(int64_t seed = 5) {
  const NoSpmd plain;
  torch::manual_seed(seed);
  // The first half of the batch likes other experts than the second.
  return torch::randn({kBatch, kLength, kDim}, torch::kDouble) + torch::tensor({2., 2., -2., -2.}, torch::kDouble).view({4, 1, 1});
}

struct Pass {
  std::vector<at::Tensor> gradients;
  double norm = 0;
};

// One forward and backward pass of a layer of experts; `between` is called between them.
Pass pass(const nn::MoEOptions& options, const std::function<void(nn::MoE&)>& lay_out, const Place& place, double scale = 1,
          const std::function<void(nn::MoE&)>& between = [](auto&) {}) {
  torch::manual_seed(4);
  nn::MoE moe(options);
  moe->to(torch::kDouble);
  lay_out(moe);
  moe->loss_scale = scale;
  const auto y = moe(place(input()));
  between(moe);
  (y.square().mean() * scale).backward();
  Pass result;
  for (const auto& p : moe->parameters()) result.gradients.push_back(full_tensor(p.grad()).clone());
  result.norm = clip_grad_norm_(moe->parameters(), 1e9);
  return result;
}

Pass here(const nn::MoEOptions& options, const at::Tensor& x = input()) {
  const NoSpmd plain;
  return pass(options, [](auto&) {}, [&](const at::Tensor&) { return x; });
}

void compare(const Pass& got, const Pass& expected, const std::string& what) {
  const NoSpmd plain;
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    const auto difference = (got.gradients[i] - expected.gradients[i]).abs().max().item<double>();
    require(difference < 1e-13, "test", "{}: gradient {} differs by {}", what, i, difference);
  }
  require(std::abs(got.norm - expected.norm) < 1e-12 * expected.norm, "test", "{}: the norm is {} and not {}", what, got.norm,
          expected.norm);
}

// Runs `body(mesh)` on meshes of these names, over two transports.
void on_meshes(const std::vector<std::string>& names, const std::function<void(const DeviceMesh&)>& body) {
  for (const std::string transport : {"threads", "shm"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        1 << names.size(),
        [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, std::vector<int64_t>(names.size(), 2), names);
          const Spmd spmd(mesh);
          body(mesh);
        },
        transport));
  }
}

Place placed(const DeviceMesh& mesh, Placements placements) {
  return [mesh, placements](const at::Tensor& x) { return distribute_tensor(x, mesh, placements).tensor(); };
}

}  // namespace

// pytorch 160285, Megatron-LM 5956, DeepSpeed 5259, megablocks 86.
TEST_CASE("faults: gradients of experts are as many times too large as ranks share them", "[experts]") {
  const auto expected = here(options_of());
  on_meshes({"dp", "ep"}, [&](const DeviceMesh& mesh) {
    for (const bool fully : {false, true}) {
      const auto lay_out = [&](nn::MoE& moe) {
        if (fully) fully_shard(*moe, mesh["dp"]);
        expert_parallel(*moe, mesh);
      };
      compare(pass(options_of(), lay_out, placed(mesh, {shard(0), shard(0)})), expected, fully ? "fully sharded" : "sharded");
    }
  });
}

// Megatron-LM 7452.10, and any mean of the ranks' own losses, which are other numbers.
TEST_CASE("faults: the balance loss counts the tokens of one rank only", "[experts]") {
  const auto options = kBalanced;
  const auto expected = here(options), first = here(options, input().narrow(0, 0, 2)), second = here(options, input().narrow(0, 2, 2));
  const auto mean = (first.gradients[0] + second.gradients[0]) / 2;
  REQUIRE((mean - expected.gradients[0]).abs().max().item<double>() > 1e-4);  // so the fault would be seen
  on_meshes({"ep"}, [&](const DeviceMesh& mesh) {
    compare(pass(options, [&](nn::MoE& moe) { expert_parallel(*moe, mesh); }, placed(mesh, {shard(0)})), expected, "two ranks");
  });
}

// Megatron-LM 7452.10: counts that are reduced in place are no longer the rank's own.
TEST_CASE("faults: looking at the counts changes the gradients", "[experts]") {
  const auto options = options_of([](auto& o) { o.balance_loss = 0.5, o.balance_over = "global"; });
  const auto expected = here(options);
  on_meshes({"ep"}, [&](const DeviceMesh& mesh) {
    const auto look = [](nn::MoE& moe) {
      const auto once = moe->counts(), twice = moe->counts();
      require(once.equal(twice) && once.sum().item<int64_t>() == kBatch * kLength * 2, "test", "counted {}", once.sum().item<int64_t>());
    };
    compare(pass(options, [&](nn::MoE& moe) { expert_parallel(*moe, mesh); }, placed(mesh, {shard(0)}), 1, look), expected, "two ranks");
  });
}

// Megatron-LM 3672 and 3768; here a loss that is scaled scales the layer's loss too.
TEST_CASE("faults: the scale of the balance loss hangs on tp or cp", "[experts]") {
  const auto options = kBalanced;
  auto expected = here(options);
  for (auto& gradient : expected.gradients) gradient *= 0.25;
  expected.norm *= 0.25;
  on_meshes({"cp", "tp"}, [&](const DeviceMesh& mesh) {
    const auto by = [&](const ExpertParallelOptions& o) { return [&, o](nn::MoE& moe) { expert_parallel(*moe, mesh, o); }; };
    compare(pass(options, by({.dims = {"cp"}, .hidden = "tp"}), placed(mesh, {shard(1), replicate()}), 0.25), expected, "cut width");
    compare(pass(options, by({.dims = {"cp", "tp"}}), placed(mesh, {shard(1), shard(1)}), 0.25), expected, "cut positions");
    compare(pass(options, by({.dims = {"tp"}}), placed(mesh, {shard(1), replicate()}), 0.25), expected, "whole tokens");
  });
}

// The same, in each rank's own number of tokens.
TEST_CASE("faults: a capacity is of the tokens of one rank", "[experts]") {
  for (const auto* drop : {"position", "probability"}) {
    const auto options = options_of([&](auto& o) { o.capacity_factor = 0.7, o.drop = drop; });
    const auto expected = here(options);
    on_meshes({"dp", "ep"}, [&](const DeviceMesh& mesh) {
      const auto lay_out = [&](nn::MoE& moe) { expert_parallel(*moe, mesh); };
      compare(pass(options, lay_out, placed(mesh, {shard(0), shard(0)})), expected, drop);
      compare(pass(options, lay_out, placed(mesh, {shard(1), shard(1)})), expected, drop);
    });
  }
}

// Megatron-LM 5916: with both, norms left experts out, or counted them twice.
TEST_CASE("faults: the clip norm misses experts where ep and tp both cut", "[experts]") {
  const auto expected = here(kBalanced);
  on_meshes({"ep", "tp"}, [&](const DeviceMesh& mesh) {
    const auto lay_out = [&](nn::MoE& moe) { expert_parallel(*moe, mesh, {.hidden = "tp"}); };
    compare(pass(kBalanced, lay_out, placed(mesh, {shard(0), replicate()})), expected, "ep and tp");
  });
}

// Megatron-LM 6228: weights that were "byte-identical to init" after training.
TEST_CASE("faults: the experts never learn", "[experts]") {
  on_meshes({"dp", "ep"}, [&](const DeviceMesh& mesh) {
    Net net(options_of());
    expert_parallel(*net, mesh);
    fully_shard(*net, mesh["dp"]);
    std::vector<at::Tensor> before;
    for (const auto& p : net->parameters()) before.push_back(full_tensor(p.detach()).clone());
    torch::optim::AdamW optimizer(net->parameters(), 0.01);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      net(placed(mesh, {shard(0), shard(0)})(input().to(torch::kFloat))).square().mean().backward();
      optimizer.step();
    }
    for (size_t i = 0; i < before.size(); ++i) {
      const NoSpmd plain;
      const auto changed = full_tensor(net->parameters()[i].detach()).ne(before[i]);
      const auto rows = changed.reshape({changed.size(0), -1}).any(1).sum().item<int64_t>();
      require(rows >= (changed.dim() == 3 ? 6 : 1), "test", "of parameter {} only {} rows changed", i, rows);
    }
  });
}

// What is saved from experts over two ranks is the same over four, with one name and the whole model's number.
TEST_CASE("faults: a checkpoint of other ep has other experts", "[experts]") {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("dtensor_experts_{}", getpid());
  const auto options = options_of([](auto& o) { o.bias_rate = 0.1; });
  const auto values = [](Net& net) {
    std::vector<at::Tensor> all;
    for (const auto& p : net->parameters()) all.push_back(full_tensor(p.detach()).clone());
    all.push_back(full_tensor(net->moe->bias).clone());
    return all;
  };
  std::vector<at::Tensor> saved;
  const auto run = [&](int dp, int ep, bool saves) {
    on_ranks(4, [&](World& world) {
      const auto mesh = init_device_mesh(c10::kCPU, {dp, ep}, {"dp", "ep"});
      const Spmd spmd(mesh);
      torch::manual_seed(saves ? 1 : 2);
      Net net(options);
      expert_parallel(*net, mesh);
      if (saves) {
        net(placed(mesh, {shard(0), shard(0)})(input().to(torch::kFloat)));
        nn::update_balance(*net);
      }
      State state{{"model", *net}};
      if (saves) save(state, folder.string(), 1);
      if (!saves) load(state, folder.string());
      const auto now = values(net);
      const NoSpmd plain;
      if (saves && world.rank() == 0) saved = now;
      for (size_t i = 0; !saves && i < now.size(); ++i) require(now[i].equal(saved[i]), "test", "tensor {} is another", i);
    });
  };
  REQUIRE_NOTHROW(run(2, 2, true));
  REQUIRE(saved.back().abs().sum().item<double>() > 0);
  REQUIRE_NOTHROW(run(1, 4, false));
  REQUIRE_NOTHROW(run(4, 1, false));
  std::filesystem::remove_all(folder);
}

// Megatron-LM 1444 and 7452.12: stages without experts hang, or number layers anew.
TEST_CASE("faults: a stage of a pipeline without experts", "[experts]") {
  on_meshes({"pp", "ep"}, [&](const DeviceMesh& mesh) {
    const auto own = stage_mesh(mesh);
    const Spmd spmd(own);
    torch::manual_seed(3);
    auto net = [&] {
      const DeferredInit deferred(own);
      Net made(kBalanced);
      made->to(torch::kDouble);
      return made;
    }();
    expert_parallel(*net, own);
    auto pipe = pipeline(*net, mesh,
                         {piece("in", [&](const at::Tensor& x) { return torch::tanh(net->in(x)); }),
                          piece("moe|out", [&](const at::Tensor& h) { return net->out(h + net->moe(h)); })},
                         {.microbatches = 2});
    pipe.materialize();
    nn::set_loss_scale(*net, 0.5);
    std::vector<at::Tensor> inputs;
    for (const auto& half : input().chunk(2)) inputs.push_back(distribute_tensor(half, own, {shard(0)}));
    pipe.step(inputs, inputs, [](const at::Tensor& y, const at::Tensor& x) { return torch::mse_loss(y, x) / 2; });
    const auto got = pipe.gather([](const at::Tensor& p) { return p.grad(); });
    nn::update_balance(*net);

    const NoSpmd plain;
    torch::manual_seed(3);
    Net whole(kBalanced);
    whole->to(torch::kDouble);
    nn::set_loss_scale(*whole, 0.5);
    for (const auto& half : input().chunk(2)) (torch::mse_loss(whole(half), half) / 2).backward();
    for (size_t i = 0; i < got.size(); ++i) {
      require((got[i] - whole->parameters()[i].grad()).abs().max().item<double>() < 1e-13, "test", "gradient {} differs", i);
    }
  });
}

}  // namespace dtensor::test::experts
