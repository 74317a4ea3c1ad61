// Checkpoints: what is saved on one mesh is loaded on any other, bit for bit.
#include "tests/support/saved_training_support.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/training/lr.hpp>

#include <atomic>

namespace dt = dtensor;
using namespace dt::test;

TEST_CASE("checkpoint: a model of every kind of tensor goes from each way to each", "[checkpoint]") {
  for (const auto* transport : {"threads", "shm"}) {
    for (const auto& from : ways()) {
      const Folder folder;
      INFO(transport << ", from " << from);
      const ManyKinds expected(1);
      REQUIRE_NOTHROW(on_way(
          from, 1,
          [&](dt::World&, ManyKinds& model) {
            dt::save({{"model", model}}, folder.path, 7);
          },
          transport));
      const auto saved = dt::checkpoints::read_index(dt::step_folder(folder.path, 7));
      for (const auto& to : ways()) {
        INFO("to " << to);
        std::atomic<int64_t> read = 0;
        REQUIRE_NOTHROW(on_way(
            to, 2,
            [&](dt::World&, ManyKinds& model) {
              dt::State state{{"model", model}};
              dt::require(dt::load(state, folder.path) == 7, "test", "another step");
              same_module(*model, *expected, "loaded");
              read += dt::checkpoints::last_load().bytes_read;
            },
            transport));
        CHECK(read == saved.bytes());
      }
    }
  }
}

TEST_CASE("checkpoint: training goes on with every optimizer on any mesh", "[checkpoint][optim]") {
  const auto state_of = [](Training& t) {
    dt::State state{{"optimizer", *t.optimizer}};
    for (size_t i = 0; i < t.parameters.size(); ++i) state.add({"parameter" + std::to_string(i), t.parameters[i]});
    return state;
  };
  for (const auto& kind : kinds()) {
    for (const auto* transport : {"threads", "shm"}) {
      CAPTURE(kind.name, transport);
      const Folder folder;
      Training whole(kind);
      whole.go(0, kHalf);
      dt::save(state_of(whole), folder / "plain", 1);
      whole.go(kHalf, kSteps);
      const auto expected = whole.wholes();
      Tensors on_grid;
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](dt::World& world) {
            dt::Spmd spmd(grid());
            Training t(kind, grid(), kGrid), again(kind, grid(), kGrid), from_plain(kind, grid(), kGrid);
            t.go(0, kHalf);
            dt::save(state_of(t), folder / "grid", 3);
            t.go(kHalf, kSteps);
            const auto whole_on_grid = t.wholes();
            same(whole_on_grid, expected, kind.tolerance, "after saving");
            again.go(0, 1);  // states that are replaced
            dt::load(state_of(again), folder / "grid");
            again.go(kHalf, kSteps);
            same(again.wholes(), whole_on_grid, 0, "resumed on the same mesh");
            dt::load(state_of(from_plain), folder / "plain");
            from_plain.go(kHalf, kSteps);
            same(from_plain.wholes(), expected, kind.tolerance, "resumed on a mesh from one device");
            if (world.rank() == 0) on_grid = whole_on_grid;
          },
          transport));
      REQUIRE_NOTHROW(on_ranks(
          3,
          [&](dt::World& world) {
            dt::Spmd spmd(line(world));
            Training t(kind, line(world), kLine);
            dt::load(state_of(t), folder / "grid");
            t.go(kHalf, kSteps);
            same(t.wholes(), on_grid, kind.tolerance, "resumed on another mesh");
          },
          transport));
      Training alone(kind);
      dt::load(state_of(alone), folder / "grid");
      alone.go(kHalf, kSteps);
      CHECK_NOTHROW(same(alone.wholes(), on_grid, kind.tolerance, "resumed on one device"));
    }
  }
}

// The parameters go by the names of their module: another order and other groups do not matter.
TEST_CASE("checkpoint: an optimizer finds its states by name", "[checkpoint][optim]") {
  const Folder folder;
  const auto make = [](bool turned) {
    torch::manual_seed(3);
    auto model = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(4, 6), torch::nn::Linear(6, 3));
    auto all = model->parameters();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    if (turned) {
      std::reverse(all.begin(), all.end());
      groups.emplace_back(std::vector<at::Tensor>(all.begin(), all.begin() + 1));
      groups.emplace_back(std::vector<at::Tensor>(all.begin() + 1, all.end()));
    } else {
      groups.emplace_back(all);
    }
    return std::make_pair(model, std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(turned ? 0.5 : 0.03)));
  };
  const auto go = [](auto& pair) {
    for (int step = 0; step < 3; ++step) {
      pair.second->zero_grad();
      pair.first->forward(torch::arange(8, torch::kFloat).view({2, 4})).square().sum().backward();
      pair.second->step();
    }
  };
  auto straight = make(false), turned = make(true);
  go(straight);
  dt::save({{"model", *straight.first}, {"optimizer", *straight.second}}, folder.path, 1);
  dt::State state{{"model", *turned.first}, {"optimizer", *turned.second}};
  dt::load(state, folder.path);
  CHECK(turned.second->param_groups()[1].options().get_lr() == 0.03);
  go(straight);
  go(turned);
  for (size_t i = 0; i < 4; ++i) CHECK(straight.first->parameters()[i].equal(turned.first->parameters()[i]));
}

TEST_CASE("checkpoint: numbers texts schedules samplers and random streams come back", "[checkpoint]") {
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        3,
        [&](dt::World& world) {
          const auto mesh = line(world);
          dt::Spmd spmd(mesh);
          torch::manual_seed(11);
          int64_t epoch = 5, none = 0;
          int small = -3;
          double rate = 0.1, endless = std::numeric_limits<double>::infinity();
          float third = 1.0F / 3;
          bool yes = true;
          std::string text = "Grüße \"\\\n", own = "rank " + std::to_string(world.rank());
          auto weight = dt::distribute_tensor(torch::arange(12, torch::kDouble), mesh, {dt::shard(0)}).tensor().clone();
          torch::optim::SGD sgd({weight}, 0.5);
          dt::lr::Scheduler scheduler(sgd, dt::lr::cosine(10));
          scheduler.step();
          std::optional<dt::NoSpmd> plain(std::in_place);
          torch::data::samplers::RandomSampler sampler(20);
          sampler.next(6);
          plain.reset();
          dt::State state{{"epoch", epoch},
                          {"none", none},
                          {"small", small},
                          {"rate", rate},
                          {"endless", endless},
                          {"third", third},
                          {"yes", yes},
                          {"text", text},
                          {"own", dt::of_each_rank(own)},
                          {"scheduler", scheduler},
                          {"sampler", dt::of_each_rank(sampler)},
                          {"random", dt::random_streams()},
                          {"weight", weight}};
          const auto draw = [&] {
            auto drawn = dt::full_tensor(torch::rand({7}));
            const auto local = dt::rank_local_random();
            return torch::cat({drawn, torch::rand({3})});
          };
          draw();
          dt::save(state, folder.path, 2);
          const auto drawn = draw();
          const auto next = *sampler.next(6);
          epoch = 9, none = 1, small = 0, rate = 0, endless = 0, third = 0, yes = false, text = own = "";
          scheduler.set_step(7);
          weight.zero_();
          dt::load(state, folder.path);
          const bool right = epoch == 5 && none == 0 && small == -3 && rate == 0.1 && std::isinf(endless) && third == 1.0F / 3 && yes &&
                             text == "Grüße \"\\\n" && own == "rank " + std::to_string(world.rank()) && scheduler.current_step() == 1;
          dt::require(right, "test", "a value is another: {} {} {} {} {} '{}' '{}'", epoch, none, small, rate, third, text, own);
          dt::require(dt::full_tensor(weight).equal(torch::arange(12, torch::kDouble)), "test", "the weight is another");
          dt::require(draw().equal(drawn), "test", "other numbers are drawn");
          dt::require(*sampler.next(6) == next, "test", "the sampler goes on elsewhere");
        },
        transport));
  }
}
