// A pipeline gives the bits of one device, under every schedule.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/parallel/pipeline/runner.hpp>
#include <dtensor/parallel/pipeline/schedules.hpp>
#include <dtensor/training/checkpoint.hpp>

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::pipelining;

namespace {

constexpr int64_t kWidth = 8;

struct Layer : torch::nn::Module {
  Layer()
      : up(register_module("up", torch::nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", torch::nn::Linear(2 * kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + torch::dropout(down(torch::gelu(up(x))), dropout, true); }
  double dropout = 0;
  torch::nn::Linear up, down;
};

// What one device computes in `steps` steps of which the last counts: losses, gradients, and what is drawn afterwards.
TensorVector on_one_device(int layers, int microbatches, double dropout = 0, int steps = 1) {
  torch::manual_seed(0);
  std::vector<std::shared_ptr<Layer>> model;
  for (int i = 0; i < layers; ++i) model.push_back(std::make_shared<Layer>());
  TensorVector results;
  const auto batch = torch::randn({2 * microbatches, kWidth});
  for (const auto& layer : model) layer->dropout = dropout;
  for (int step = 0; step < steps; ++step) {
    results.clear();
    for (const auto& layer : model) layer->zero_grad();
    for (const auto& x : batch.chunk(microbatches)) {
      auto h = x;
      for (const auto& layer : model) h = layer->forward(h);
      const auto loss = h.square().mean();
      loss.backward();
      results.push_back(loss.detach());
    }
  }
  for (const auto& layer : model) {
    for (const auto& parameter : layer->parameters()) results.push_back(parameter.grad());
  }
  results.push_back(torch::rand({3}));
  return results;
}

// With `checkpointed`, each layer runs inside a checkpoint region: once more for its backward, whether that is in halves or not.
void check_pipeline(const DeviceMesh& mesh, const Schedule& schedule, const TensorVector& expected, double dropout = 0,
                    bool checkpointed = false) {
  constexpr int steps = 2;
  const auto own = mesh.slice("pp", mesh.coordinate(mesh.dim("pp")));
  const int layers = schedule.stages();
  std::vector<std::shared_ptr<Layer>> model;
  at::Tensor batch;
  {
    const Spmd spmd(own);
    torch::manual_seed(0);
    for (int i = 0; i < layers; ++i) model.push_back(std::make_shared<Layer>());
    batch = torch::randn({2 * schedule.microbatches, kWidth});
  }
  for (const auto& layer : model) layer->dropout = dropout;
  std::vector<StageForward> forwards;
  std::vector<int> calls(layers, 0);
  for (int s = 0; s < layers; ++s) {
    const auto run = [layer = model[s], &count = calls[s]](const at::Tensor& x) {
      ++count;
      return layer->forward(x);
    };
    forwards.push_back([=](const TensorVector& x) { return TensorVector{checkpointed ? checkpoint(run, x[0]) : run(x[0])}; });
  }
  Runner runner({mesh, "pp"}, schedule, forwards);
  std::vector<TensorVector> inputs;
  for (const auto& x : batch.chunk(schedule.microbatches)) inputs.push_back({x});
  for (int step = 0; step < steps; ++step) {
    for (const auto& layer : model) layer->zero_grad();
    const auto losses = runner.step(inputs, [](const TensorVector& outputs, int) { return outputs[0].square().mean(); });
    if (step + 1 < steps) continue;
    for (size_t i = 0; i < losses.size(); ++i) {
      require(full_tensor(losses[i]).equal(expected[i]), "test", "{}: loss {} differs", schedule.name, i);
    }
    for (int s = 0; s < layers; ++s) {
      if (!runner.has(s)) continue;
      const int runs = steps * schedule.microbatches * (checkpointed ? 2 : 1);
      require(calls[s] == runs, "test", "{}: stage {} ran {} times; expected {}", schedule.name, s, calls[s], runs);
      const auto parameters = model[s]->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& gradient = parameters[i].grad();
        require(gradient.defined(), "test", "{}: stage {} has no gradient {}", schedule.name, s, i);
        require(full_tensor(gradient).equal(expected[schedule.microbatches + s * parameters.size() + i]), "test",
                "{}: gradient {} of stage {} differs", schedule.name, i, s);
      }
    }
  }
  require(torch::rand({3}).equal(expected.back()), "test", "{}: the random numbers after the steps differ", schedule.name);
}

}  // namespace

TEST_CASE("pipeline: one device's losses and gradients under every schedule", "[pipeline]") {
  for (const int ranks : {1, 2, 4}) {
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      for (const auto& named : named_schedules()) {
        const auto name = std::string(named.name);
        if (name == "looped_bfs") continue;  // it adds in another order
        CAPTURE(ranks, transport, name);
        const auto schedule = make_schedule(name, {.ranks = ranks, .microbatches = 2 * ranks});
        for (const double dropout : {0.0, 0.25}) {
          const auto expected = on_one_device(schedule.stages(), schedule.microbatches, dropout, 2);
          const auto run = [&](World&) { check_pipeline(init_device_mesh(c10::kCPU, {ranks}, {"pp"}), schedule, expected, dropout); };
          REQUIRE_NOTHROW(on_ranks(ranks, run, transport));
        }
      }
    }
  }
}

TEST_CASE("pipeline: checkpoint regions run again once for each microbatch", "[pipeline][checkpoint]") {
  for (const std::string transport : {"threads", "shm"}) {
    for (const std::string name : {"1f1b", "zb1p", "zb2p", "zbv"}) {
      CAPTURE(transport, name);
      const auto schedule = make_schedule(name, {.ranks = 2, .microbatches = 4});
      const auto expected = on_one_device(schedule.stages(), schedule.microbatches, 0.25, 2);
      const auto run = [&](World&) { check_pipeline(init_device_mesh(c10::kCPU, {2}, {"pp"}), schedule, expected, 0.25, true); };
      REQUIRE_NOTHROW(on_ranks(2, run, transport));
    }
  }
}

namespace {

// Three values between stages: one in another order in memory, one that needs no gradient.
TensorVector three_values(const at::Tensor& weight, const TensorVector& x) {
  const auto h = at::matmul(x[0], weight);
  const auto side = x.size() > 1 ? x[1] + 1 : x[0].detach().to(at::kLong);
  const auto turned = x.size() > 2 ? x[2] * 2 + h.transpose(0, 1) : h.transpose(0, 1).clone();
  return {h, side, turned.t().contiguous().t()};
}

// Losses and the input gradients of the weights, for sizes that change from microbatch to microbatch.
void check_many_values(const DeviceMesh& mesh, const std::string& name) {
  const auto own = mesh.slice("pp", mesh.coordinate(0));
  const auto schedule = make_schedule(name, {.ranks = static_cast<int>(mesh.size()), .microbatches = 4});
  std::vector<at::Tensor> weights, plain;
  for (int s = 0; s < schedule.stages(); ++s) {
    plain.push_back(fractions({kWidth, kWidth}, s).requires_grad_());
    weights.push_back(at::Tensor(distribute_tensor(plain.back().detach(), own, {replicate()})).detach().requires_grad_());
  }
  std::vector<StageForward> forwards;
  for (const auto& w : weights) forwards.push_back([w](const TensorVector& x) { return three_values(w, x); });
  Runner runner({mesh, "pp"}, schedule, forwards);
  const auto loss_of = [](const TensorVector& y) { return y[0].square().mean() + (y[1] * y[0]).sum() * 0.25 + y[2].sum(); };
  for (int step = 0; step < 3; ++step) {
    std::vector<TensorVector> inputs;
    for (int i = 0; i < 4; ++i) inputs.push_back({fractions({1 + (i + step) % 3, kWidth}, i)});
    const auto losses = runner.step(inputs, [&](const TensorVector& y, int) { return loss_of(y); });
    for (int i = 0; i < 4; ++i) {
      auto y = inputs[i];
      for (const auto& w : plain) y = three_values(w, y);
      const auto loss = loss_of(y);
      loss.backward();
      require(losses.empty() || full_tensor(losses[i]).equal(loss.detach()), "test", "{}, step {}: loss {} differs", name, step, i);
    }
    for (int s = 0; s < schedule.stages(); ++s) {
      if (runner.has(s))
        require(full_tensor(weights[s].grad()).equal(plain[s].grad()), "test", "{}, step {}: gradient {} differs", name, step, s);
    }
  }
}

}  // namespace

TEST_CASE("pipeline: several values between stages and sizes that change", "[pipeline]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const std::string name : {"1f1b", "zbv", "interleaved"}) {
      CAPTURE(transport, name);
      REQUIRE_NOTHROW(on_ranks(
          2, [&](World&) { check_many_values(init_device_mesh(c10::kCPU, {2}, {"pp"}), name); }, transport));
    }
  }
}

TEST_CASE("pipeline: with data and tensor parallelism", "[pipeline]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const std::string name : {"1f1b", "zb1p", "zbv"}) {
      CAPTURE(transport, name);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"pp", "tp"});
            const auto own = mesh["tp"];
            const auto schedule = make_schedule(name, {.ranks = 2, .microbatches = 4});
            const auto expected = on_one_device(schedule.stages(), 4);
            std::vector<std::shared_ptr<Layer>> model;
            std::vector<StageForward> forwards;
            at::Tensor batch;
            {
              const Spmd spmd(own);
              torch::manual_seed(0);
              for (int s = 0; s < schedule.stages(); ++s) model.push_back(std::make_shared<Layer>());
              batch = torch::randn({8, kWidth});
            }
            for (const auto& layer : model) {
              parallelize_module(*layer, own, {{"up.*", {{"tp", shard(0)}}}, {"down.weight", {{"tp", shard(1)}}}});
              forwards.push_back([layer](const TensorVector& x) { return TensorVector{layer->forward(x[0])}; });
            }
            Runner runner({mesh, "pp"}, schedule, forwards);
            std::vector<TensorVector> inputs;
            for (const auto& x : batch.chunk(4)) inputs.push_back({x});
            const auto losses = runner.step(inputs, [](const TensorVector& y, int) { return y[0].square().mean(); });
            for (size_t i = 0; i < losses.size(); ++i) require(full_tensor(losses[i]).allclose(expected[i]), "test", "loss {} differs", i);
            for (int s = 0; s < schedule.stages(); ++s) {
              const auto parameters = model[s]->parameters();
              for (size_t i = 0; runner.has(s) && i < parameters.size(); ++i) {
                require(full_tensor(parameters[i].grad()).allclose(expected[4 + s * parameters.size() + i], 1e-5, 1e-6), "test",
                        "gradient {} of stage {} differs", i, s);
              }
            }
          },
          transport));
    }
  }
}

TEST_CASE("pipeline: gradients over the data dimension are reduced once", "[pipeline]") {
  REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"pp", "dp"});
    const auto own = mesh["dp"];
    const auto schedule = make_schedule("zb1p", {.ranks = 2, .microbatches = 4});
    const auto weight = at::Tensor(distribute_tensor(fractions({kWidth, kWidth}), own, {replicate()})).detach().requires_grad_();
    const StageForward forward = [&](const TensorVector& x) { return TensorVector{at::matmul(x[0], weight)}; };
    Runner runner({mesh, "pp"}, schedule, {forward, forward});
    std::vector<TensorVector> inputs;
    for (int i = 0; i < 4; ++i) inputs.push_back({distribute_tensor(fractions({4, kWidth}, i), own, {shard(0)})});
    const auto plain = std::vector{fractions({kWidth, kWidth}).requires_grad_(), fractions({kWidth, kWidth}).requires_grad_()};
    for (const auto& x : inputs) at::matmul(at::matmul(full_tensor(x[0]), plain[0]), plain[1]).sum().backward();
    const CommDebugMode comm;
    runner.step(inputs, [](const TensorVector& y, int) { return y[0].sum(); });
    int64_t reductions = 0;
    for (const auto& [line, totals] : comm.lines()) reductions += line.op == "gradient" ? totals.count : 0;
    require(reductions == 1, "test", "{} reductions of a gradient: {}", reductions, comm.str());
    require(full_tensor(weight.grad()).allclose(plain[mesh.coordinate(0)].grad()), "test", "the gradient differs");
    runner.step(
        inputs, [](const TensorVector& y, int) { return y[0].sum(); }, /*sync=*/false);
    runner.step(inputs, [](const TensorVector& y, int) { return y[0].sum(); });
    reductions = 0;
    for (const auto& [line, totals] : comm.lines()) reductions += line.op == "gradient" ? totals.count : 0;
    require(reductions == 2, "test", "{} reductions over two accumulated steps", reductions - 1);
    require(full_tensor(weight.grad()).allclose(plain[mesh.coordinate(0)].grad() * 3), "test", "the accumulated gradient differs");
  }));
}

TEST_CASE("pipeline: the sum of a sharded parameter is reduced once", "[pipeline]") {
  for (const std::string transport : {"threads", "gloo"}) {
    CAPTURE(transport);
    const auto run = [](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"pp", "tp"});
      const auto own = mesh["tp"];
      const auto values = fractions({kWidth, kWidth});
      const auto weight = at::Tensor(distribute_tensor(values, own, {shard(0)})).detach().requires_grad_();
      weight.register_hook([&](const at::Tensor&) {  // parts of a sum, as where positions are cut over the same ranks
        const NoSpmd plain;
        return from_local(values, own, Placements{partial()}, values.sizes()).tensor();
      });
      const StageForward forward = [&](const TensorVector& x) { return TensorVector{at::matmul(x[0], weight)}; };
      Runner runner({mesh, "pp"}, make_schedule("1f1b", {.ranks = 1, .microbatches = 4}), {forward});
      const std::vector<TensorVector> inputs(4, {fractions({4, kWidth}, 1)});
      const auto count = [&](const at::Tensor& gradient) {
        weight.mutable_grad() = gradient;
        const CommDebugMode comm;
        runner.step(inputs, [](const TensorVector& y, int) { return y[0].sum(); });
        return comm.count();
      };
      count({});  // what is learned once
      const auto into_none = count({}), into_zeros = count(at::zeros_like(weight).detach());
      require(into_zeros == into_none, "test", "{} collectives; into gradients that are there {}", into_none, into_zeros);
      require(full_tensor(weight.grad()).equal(values * 8), "test", "the gradient differs");
    };
    REQUIRE_NOTHROW(on_ranks(2, run, transport));
  }
}

TEST_CASE("pipeline: evaluation", "[pipeline]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
    const auto own = mesh.slice("pp", mesh.coordinate(0));
    const auto weight = at::Tensor(distribute_tensor(fractions({kWidth, kWidth}), own, {replicate()})).detach().requires_grad_();
    const StageForward forward = [&](const TensorVector& x) { return TensorVector{at::matmul(x[0], weight)}; };
    Runner runner({mesh, "pp"}, make_schedule("1f1b", {.ranks = 2, .microbatches = 3}), {forward, forward});
    const std::vector<TensorVector> inputs{{fractions({2, kWidth}, 1)}, {fractions({2, kWidth}, 2)}, {fractions({1, kWidth}, 3)}};
    const auto loss = [](const TensorVector& y, int) { return y[0].sum(); };
    for (int round = 0; round < 2; ++round) {
      {
        const at::NoGradGuard no_grad;
        const auto losses = runner.step(inputs, loss);
        for (size_t i = 0; i < losses.size(); ++i) {
          const auto w = fractions({kWidth, kWidth});
          require(full_tensor(losses[i]).equal(at::matmul(at::matmul(inputs[i][0], w), w).sum()), "test", "loss {} differs", i);
        }
      }
      require(weight.grad().defined() == (round > 0), "test", "evaluation made a gradient, or training none");
      runner.step(inputs, loss);
    }
  }));
}

TEST_CASE("pipeline: a stage that throws is named on every rank", "[pipeline][errors]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    std::atomic<int> told = 0;
    const auto run = [&](World& world) {
      const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
      const auto weight =
          at::Tensor(distribute_tensor(torch::ones({2}), mesh.slice("pp", world.rank()), {replicate()})).detach().requires_grad_();
      int calls = 0;
      const StageForward forward = [&](const TensorVector& x) {
        if (world.rank() == 1 && ++calls == 3) throw std::runtime_error("bad luck");
        return TensorVector{x[0] * weight};
      };
      Runner runner({mesh, "pp"}, make_schedule("1f1b", {.ranks = 2, .microbatches = 4}), {forward, forward});
      try {
        runner.step(std::vector<TensorVector>(4, {torch::ones({2})}), [](const TensorVector& y, int) { return y[0].sum(); });
      } catch (const std::exception& error) {
        const std::string text = error.what();
        told += text.find("stage 1 failed at 1F2 (microbatch 2) in step 0") != text.npos && text.find("bad luck") != text.npos;
        throw;
      }
    };
    REQUIRE_THROWS_WITH(on_ranks(2, run, transport), says("1F2"));
    CHECK(told == 2);
  }
}

TEST_CASE("pipeline: what it refuses", "[pipeline][errors]") {
  const Alone alone(4);
  const auto mesh = DeviceMesh(c10::kCPU, {0}, {1}, {"pp"});
  const StageForward same = [](const TensorVector& x) { return x; };
  const auto schedule = make_schedule("gpipe", {.ranks = 1, .microbatches = 2});
  CHECK_THROWS_WITH(Runner({mesh, "pp"}, schedule, {same, same}), says("got 2 stages; expected the schedule's 1"));
  CHECK_THROWS_WITH(Runner({mesh, "dp"}, schedule, {same}), says("dp"));
  CHECK_THROWS_WITH(Runner({mesh, "pp"}, make_schedule("gpipe", {.ranks = 2, .microbatches = 2}), {same, same}), says("is for 2 ranks"));
  Runner runner({mesh, "pp"}, schedule, {same});
  CHECK_THROWS_WITH(runner.step({}, {}), says("got 0 microbatches; expected the schedule's 2"));
}
