// Fully sharded stages, which are gathered as the schedule says.
#include "tests/support/pipelined_model.hpp"

#include <dtensor/parallel/fully_shard.hpp>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::test::pipelined;

namespace {

constexpr int kLayers = 6;

struct Told {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients;
  int64_t units = 0, gathers = 0, reductions = 0;  // of this rank: all, and those of the last step
  int64_t largest_stage = 0, all_stages = 0, peak = 0, left = 0;  // bytes
};

struct Case {
  std::string schedule;
  int chunks, whole_stages;
  bool reshard = true;
};

// A unit for each piece of the model, so that none lies in two stages.
FullyShardOptions each_piece() {
  FullyShardOptions options;
  options.units = {"words", "blocks.*", "head"};
  return options;
}

// Two steps whose gradients add up. The first one learns how much the stages draw.
Told train(const DeviceMesh& mesh, const Case& c) {
  const auto own = stage_mesh(mesh);
  torch::manual_seed(1);
  auto model = [&] {
    const DeferredInit deferred(own);
    auto made = std::make_shared<Model>(kLayers);
    made->to(at::kDouble);
    return made;
  }();
  auto units = each_piece();
  units.reshard_after_forward = c.reshard;
  units.max_whole_units = 1;
  const auto sharded = fully_shard(*model, own["dp"], units);
  auto pipe = pipeline(*model, mesh, model->pieces(),
                       {.schedule = c.schedule, .microbatches = 4, .chunks = c.chunks, .whole_stages = c.whole_stages});
  pipe.materialize();
  Told told;
  for (int step = 0; step < 2; ++step) {
    const auto [ids, targets] = batch_of(step);
    const auto gathers = sharded.gathers(), reductions = sharded.reductions();
    const auto done = pipe.step(ids, targets, [&](auto& y, auto& t) { return loss_of(y, t) / pipe.microbatches(); }, step == 1);
    told.losses.insert(told.losses.end(), done.losses.begin(), done.losses.end());
    told.gathers = sharded.gathers() - gathers;
    told.reductions = sharded.reductions() - reductions;
  }
  for (const auto& [name, parameter] : pipe.named_parameters()) told.gradients[name] = full_tensor(parameter.grad());
  told.peak = sharded.peak_whole_bytes();
  told.left = sharded.whole_bytes();
  size_t piece = 0;
  for (int s = 0; s < pipe.schedule().stages(); ++s) {
    int64_t bytes = 0;
    for (int i = 0; i < pipe.cut()[s]; ++i, ++piece) {
      if (pipe.schedule().rank_of_stage[s] != mesh.coordinate(0)) continue;
      const auto unit = sharded.units().at(piece);  // a piece is a unit here
      bytes += unit.piece * own.size(0) * 8;
      ++told.units;
    }
    told.largest_stage = std::max(told.largest_stage, bytes);
    told.all_stages += bytes;
  }
  return told;
}

void check(const Told& got, const Case& c, const Told& as_used) {
  require(got.losses == as_used.losses, "test", "losses differ");
  for (const auto& [name, gradient] : got.gradients) require(gradient.equal(as_used.gradients.at(name)), "test", "'{}' differs", name);
  require(got.reductions == got.units, "test", "{} reductions of {} units", got.reductions, got.units);
  require(got.left == 0, "test", "{} bytes are left whole", got.left);
  const auto most = c.whole_stages == 1 ? got.largest_stage : got.all_stages;
  require(got.peak == most, "test", "at most {} bytes were whole; expected {}", got.peak, most);
  if (got.largest_stage == got.all_stages || c.whole_stages > 1) {
    require(got.gathers == got.units, "test", "{} units were gathered {} times", got.units, got.gathers);
  }
  require(got.gathers < as_used.gathers, "test", "{} gathers, and {} as they are used", got.gathers, as_used.gathers);
}

}  // namespace

TEST_CASE("pipeline gathering: stages are gathered as the schedule says", "[pipeline][fully_shard]") {
  const Case cases[] = {{"1f1b", 0, 3}, {"1f1b", 0, 1, false}, {"zbv", 0, 1}, {"zbv", 0, 2}, {"interleaved", 3, 3}, {"gpipe", 0, 1}};
  for (const auto& c : cases) {
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      if (transport != "threads" && c.schedule != "zbv") continue;
      CAPTURE(c.schedule, c.whole_stages, transport);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"pp", "dp"});
            auto as_used = c;
            as_used.whole_stages = 0;
            check(train(mesh, c), c, train(mesh, as_used));
          },
          transport));
    }
  }
}

TEST_CASE("pipeline gathering: the numbers are those of one device", "[pipeline][fully_shard]") {
  const auto expected = on_one_device(kLayers, 4, at::kDouble);
  for (const char* schedule : {"1f1b", "zbv"}) {
    CAPTURE(schedule);
    REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"pp", "dp"});
      check_close(on_a_pipeline(mesh, kLayers, at::kDouble, {.schedule = schedule, .microbatches = 4}, Reach::none,
                                [](Model& model, const DeviceMesh& own) { fully_shard(model, own["dp"], each_piece()); }),
                  expected);
    }));
  }
}

TEST_CASE("pipeline gathering: a step that failed leaves nothing whole", "[pipeline][fully_shard][errors]") {
  on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {1, 2}, {"pp", "dp"});
    const Spmd spmd(stage_mesh(mesh));
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    const auto sharded = fully_shard(*model, mesh["dp"]);
    bool fails = false;
    std::vector<Piece> pieces{piece("0", [&](const at::Tensor& x) { return model[0]->as<torch::nn::Linear>()->forward(x); }),
                              piece("1", [&](const at::Tensor& x) {
                                require(!fails, "test", "out of cheese");
                                return model[1]->as<torch::nn::Linear>()->forward(x);
                              })};
    auto pipe = pipeline(*model, mesh, pieces, {.microbatches = 2});
    const auto loss = [](const at::Tensor& y, const at::Tensor& t) { return (y - t).square().sum(); };
    const auto x = torch::ones({4, 4});
    pipe.step(x, x, loss);
    fails = true;
    try {
      pipe.step(x, x, loss);
      fail("test", "it did not throw");
    } catch (const c10::Error& error) {
      require(says("out of cheese").match(error.what()), "test", "{}", error.what());
    }
    fails = false;
    pipe.step(x, x, loss);
    require(sharded.whole_bytes() == 0, "test", "{} bytes are whole", sharded.whole_bytes());
  });
}

TEST_CASE("unshard: units stay whole over forwards and backwards", "[fully_shard]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        3,
        [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {3}, {"dp"});
          const Spmd spmd(mesh);
          torch::manual_seed(1);
          torch::nn::Sequential model(torch::nn::Linear(4, 5), torch::nn::Linear(5, 4), torch::nn::Linear(4, 2));
          const auto sharded = fully_shard(*model, mesh["dp"]);
          const auto parameters = model->parameters();
          const auto run = [&] { model->forward(torch::ones({2, 4})).sum().backward(); };
          run();
          const auto once = full_tensor(parameters[0].grad()).clone();
          const auto gathers = sharded.gathers();
          unshard(parameters);
          unshard({parameters[0]});
          for (int i = 0; i < 3; ++i) run();
          require(sharded.gathers() == gathers + 3, "test", "{} gathers", sharded.gathers() - gathers);
          require(full_tensor(parameters[0].grad()).equal(once + once + once + once), "test", "another gradient");
          reshard(parameters);
          require(sharded.whole_bytes() == sharded.units()[0].piece * 3 * 4, "test", "{} bytes are whole", sharded.whole_bytes());
          reshard({parameters[0]});
          require(sharded.whole_bytes() == 0, "test", "{} bytes are left", sharded.whole_bytes());
          reshard(parameters);  // one too many does nothing
          unshard(parameters);
          {
            const at::NoGradGuard no_grad;
            parameters[0].mul_(2);
          }
          const auto whole = full_tensor(parameters[0]);
          const auto y = model[0]->as<torch::nn::Linear>()->forward(torch::eye(4));
          const NoSpmd plain;
          const auto expected = whole.t() + full_tensor(parameters[1]);
          require(full_tensor(y).allclose(expected), "test", "a value of before it was written to");
          reshard(parameters);
        },
        transport));
  }
}
