// Loading into a model that is in use: between the steps of a pipeline and inside one, with gradients not reduced, with units whole.
#include "tests/support/pipelined_model.hpp"
#include "tests/support/refuses.hpp"
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/parallel/fully_shard.hpp>

namespace dt = dtensor;
using namespace dt::test;

namespace {

constexpr int kStages = 4;  // blocks, and microbatches

// The pipelined model of the tests on two stages, and its optimizer.
struct Piped {
  explicit Piped(const dt::DeviceMesh& mesh, pipelined::Reach reach = pipelined::Reach::tied) {
    const auto own = dt::stage_mesh(mesh);
    torch::manual_seed(1);
    {
      const dt::DeferredInit deferred(own);
      model = std::make_shared<pipelined::Model>(kStages, reach);
      model->to(at::kDouble);
    }
    pipe.emplace(dt::pipeline(*model, mesh, model->pieces(), {.microbatches = kStages}));
    pipe->materialize();
    optimizer.emplace(pipe->parameters(), torch::optim::AdamWOptions(1e-2));
  }
  std::vector<double> step(int number, const std::function<void()>& in_loss = [] {}, bool sync = true) {
    const auto [ids, targets] = pipelined::batch_of(number);
    const auto loss = [&](const at::Tensor& y, const at::Tensor& t) {
      in_loss();
      return pipelined::loss_of(y, t) / kStages;
    };
    return pipe->step(ids, targets, loss, sync).losses;
  }
  std::vector<double> train(int number) {
    optimizer->zero_grad();
    auto losses = step(number);
    optimizer->step();
    return losses;
  }
  dt::State state() { return {{"model", *pipe}, {"optimizer", *optimizer}, {"random", dt::random_streams()}}; }
  std::shared_ptr<pipelined::Model> model;
  std::optional<dt::Pipeline> pipe;
  std::optional<torch::optim::AdamW> optimizer;
};

torch::nn::Sequential unit_of_two_layers(const dt::DeviceMesh& mesh, const dt::FullyShardOptions& options) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::Linear(6, 2));
  dt::fully_shard(*model, mesh["dp"], options);
  return model;
}

}  // namespace

TEST_CASE("checkpoint: a pipeline goes on from what is loaded between two steps", "[checkpoint][pipeline]") {
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](dt::World&) {
          Piped piped(dt::init_device_mesh(at::kCPU, {2}, {"pp"}));
          piped.train(0);
          auto saving = dt::save(piped.state(), folder.path, 1, {.async = true});
          const auto expected = piped.train(1), after = piped.train(2);
          saving.wait();
          dt::load(piped.state(), folder.path);
          dt::require(piped.train(1) == expected && piped.train(2) == after, "test", "it goes on otherwise");
        },
        transport));
  }
}

// The rank that has the loss refuses before it waits for anyone; the pipeline's error tells the others.
TEST_CASE("checkpoint: saving and loading inside a step of a pipeline is refused", "[checkpoint][pipeline][errors]") {
  const auto inside = [](const char* transport, const Folder& folder, const std::function<void(Piped&, dt::CheckpointManager&)>& call) {
    on_ranks(
        2,
        [&](dt::World&) {
          Piped piped(dt::init_device_mesh(at::kCPU, {2}, {"pp"}));
          dt::save(piped.state(), folder.path, 1);
          dt::CheckpointManager manager(piped.state(), folder.path);
          piped.step(1, [&] { call(piped, manager); });
        },
        transport);
  };
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    const auto begin = std::chrono::steady_clock::now();
    const auto refusal = says("it was called inside a step of a pipeline");
    CHECK_THROWS_WITH(inside(transport, folder, [&](Piped& piped, auto&) { dt::load(piped.state(), folder.path); }), refusal);
    CHECK_THROWS_WITH(inside(transport, folder, [&](Piped& piped, auto&) { dt::save(piped.state(), folder.path, 2); }), refusal);
    CHECK_THROWS_WITH(inside(transport, folder, [&](Piped&, auto& manager) { manager.save(2); }), refusal);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));  // nobody waited for a deadline
    CHECK(dt::complete_steps(folder.path) == std::vector<int64_t>{1});
  }
}

TEST_CASE("checkpoint: a load is refused while gradients are not reduced", "[checkpoint][errors]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(4, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(at::kCPU, {2, 2}, {"pp", "dp"});
    const auto own = dt::stage_mesh(mesh);
    Piped piped(mesh, pipelined::Reach::none);
    dt::save({{"model", *piped.pipe}}, folder.path, 1);
    // Over dp, so that each rank has gradients of its own.
    const auto cut = [&](const at::Tensor& x) { return dt::distribute_tensor(x, own, {dt::shard(0)}).tensor(); };
    const auto [ids, targets] = pipelined::batch_of(0);
    std::vector<at::Tensor> inputs, labels;
    for (const auto& each : ids.tensor_split(kStages)) inputs.push_back(cut(each));
    for (const auto& each : targets.tensor_split(kStages)) labels.push_back(cut(each));
    const auto loss = [](const at::Tensor& y, const at::Tensor& t) { return pipelined::loss_of(y, t); };
    piped.pipe->step(inputs, labels, loss, /*sync=*/false);
    refuses("has a gradient that is not reduced yet", [&] { dt::load({{"model", *piped.pipe}}, folder.path); });
    piped.optimizer->zero_grad();  // which leaves pending zeros where it does not drop gradients
    dt::load({{"model", *piped.pipe}}, folder.path);
    piped.pipe->step(inputs, labels, loss);
    dt::load({{"model", *piped.pipe}}, folder.path);  // reduced gradients are kept, as torch::load keeps them
    dt::require(world.rank() >= 0 && piped.pipe->parameters()[0].grad().defined(), "test", "a gradient is gone");
  }));
}

TEST_CASE("checkpoint: a load is refused while gradients of units are not reduced", "[checkpoint][errors]") {
  for (const bool at_read : {false, true}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(2, [&](dt::World&) {
      const auto mesh = dt::init_device_mesh(at::kCPU, {2}, {"dp"});
      const dt::Spmd spmd(mesh);
      dt::FullyShardOptions options;
      options.reduce_at_read = at_read;
      auto model = unit_of_two_layers(mesh, options);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      const auto backward = [&] { model->forward(torch::ones({4, 6})).sum().backward(); };
      dt::save({{"model", model}}, folder.path, 1);
      {
        const dt::NoSync no_sync;
        backward();
      }
      refuses("has a gradient that is not reduced yet", [&] { dt::load({{"model", model}}, folder.path); });
      optimizer.zero_grad();
      dt::load({{"model", model}}, folder.path);
      {
        const dt::NoSync no_sync;
        backward();
      }
      backward();
      dt::load({{"model", model}}, folder.path);
    }));
  }
}

// ZeRO-2 keeps units whole from the forward pass to the backward pass; after a load they hold what was loaded.
TEST_CASE("checkpoint: units that are whole are gathered again after a load", "[checkpoint]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(at::kCPU, {2}, {"dp"});
    const dt::Spmd spmd(mesh);
    dt::FullyShardOptions options;
    options.reshard_after_forward = false;
    auto model = unit_of_two_layers(mesh, options);
    const auto x = torch::ones({3, 6});
    const auto expected = dt::full_tensor(model->forward(x).detach()).clone();
    dt::save({{"model", model}}, folder.path, 1);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.add_(1);
    }
    const auto before = model->forward(x);  // the units stay whole
    dt::unshard(model->parameters());
    dt::load({{"model", model}}, folder.path);
    dt::require(dt::full_tensor(model->forward(x).detach()).equal(expected), "test", "the units have the values from before");
    dt::reshard(model->parameters());
    std::string text;
    try {
      before.sum().backward();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    dt::require(text.find("modified by an inplace operation") != std::string::npos, "test", "the backward pass says '{}'", text);
  }));
}
