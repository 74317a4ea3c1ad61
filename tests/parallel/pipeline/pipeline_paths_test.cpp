// Schedules in which microbatches skip stages, and in which an encoder fills the gaps of another model.
#include "tests/support/core_support.hpp"

#include <dtensor/parallel/pipeline/encoder.hpp>
#include <dtensor/parallel/pipeline/runner.hpp>
#include <dtensor/parallel/pipeline/schedules.hpp>
#include <dtensor/parallel/pipeline/skip_pipe.hpp>

#include <torch/torch.h>

#include <random>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::pipelining;

namespace {

int64_t passes_of(const Schedule& schedule, int stage) {
  int64_t count = 0;
  for (int i = 0; i < schedule.microbatches; ++i) count += schedule.passes(stage, i);
  return count;
}

constexpr int64_t kNumbers = 6;

// Stages that add to their input, and draw random numbers; the gradients of each, after `run` has trained with its forwards.
struct Blocks {
  explicit Blocks(int count) {
    torch::manual_seed(2);
    for (int i = 0; i < count; ++i) all.push_back(std::make_shared<torch::nn::LinearImpl>(kNumbers, kNumbers));
  }
  at::Tensor forward(int stage, const at::Tensor& x) const { return x + torch::dropout(all[stage]->forward(x).tanh(), 0.3, true); }
  std::vector<StageForward> forwards() const {
    std::vector<StageForward> result;
    for (size_t s = 0; s < all.size(); ++s) {
      result.push_back([this, s](const TensorVector& x) { return TensorVector{forward(static_cast<int>(s), x[0])}; });
    }
    return result;
  }
  std::vector<std::shared_ptr<torch::nn::LinearImpl>> all;
};

std::vector<TensorVector> microbatches(int count) {
  std::vector<TensorVector> result;
  for (int i = 0; i < count; ++i) result.push_back({torch::arange(2 * kNumbers).view({2, kNumbers}).add(i).sin()});
  return result;
}

at::Tensor mean_square(const at::Tensor& y) { return y.square().mean(); }

// Losses, then gradients (zeros where no microbatch passed), then what is drawn afterwards.
TensorVector on_one_device(const Schedule& schedule) {
  const Blocks blocks(schedule.stages());
  TensorVector results;
  for (int i = 0; i < schedule.microbatches; ++i) {
    auto x = microbatches(schedule.microbatches)[i][0];
    for (const int stage : schedule.path(i)) x = blocks.forward(stage, x);
    const auto loss = mean_square(x);
    loss.backward();
    results.push_back(loss.detach());
  }
  for (const auto& block : blocks.all) {
    for (const auto& p : block->parameters()) results.push_back(p.grad().defined() ? p.grad() : torch::zeros_like(p));
  }
  results.push_back(torch::rand({2}));
  return results;
}

void check_runs(const Schedule& schedule, const std::string& transport = "threads") {
  const auto expected = on_one_device(schedule);
  const int ranks = static_cast<int>(schedule.ranks.size());
  REQUIRE_NOTHROW(on_ranks(
      ranks,
      [&](World& world) {
        const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"pp"});
        const Spmd spmd(mesh.slice("pp", world.rank()));
        const Blocks blocks(schedule.stages());
        Runner runner({mesh, "pp"}, schedule, blocks.forwards());
        const auto losses = runner.step(microbatches(schedule.microbatches), [](const TensorVector& y, int) { return mean_square(y[0]); });
        for (size_t i = 0; i < losses.size(); ++i) require(full_tensor(losses[i]).equal(expected[i]), "test", "loss {} differs", i);
        for (int s = 0; s < schedule.stages(); ++s) {
          if (!runner.has(s)) continue;
          const auto parameters = blocks.all[s]->parameters();
          for (size_t i = 0; i < parameters.size(); ++i) {
            const auto& wanted = expected[schedule.microbatches + 2 * s + i];
            const auto gradient = parameters[i].grad().defined() ? full_tensor(parameters[i].grad()) : torch::zeros_like(wanted);
            require(gradient.equal(wanted), "test", "a gradient of stage {} differs", s);
          }
        }
        require(full_tensor(torch::rand({2})).equal(expected.back()), "test", "other random numbers");
      },
      transport));
}

}  // namespace

TEST_CASE("pipeline paths: nothing skipped is 1F1B", "[pipeline]") {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const int count : {1, 2, 5, 8, 16}) {
      CAPTURE(ranks, count);
      const auto schedule = skip_pipe({ranks, count}, {.skipped = 0});
      CHECK(schedule.ranks == one_f_one_b({ranks, count}).ranks);
      CHECK(schedule.paths.empty());
    }
  }
}

TEST_CASE("pipeline paths: every stage gets its share and no rank holds more than 1F1B", "[pipeline]") {
  for (const int ranks : {3, 4, 6, 8}) {
    for (const int count : {2, 7, 12, 24}) {
      for (const double skipped : {0.25, 0.34, 0.5, 1.0}) {
        for (const bool reorder : {false, true}) {
          CAPTURE(ranks, count, skipped, reorder);
          const auto schedule = skip_pipe({ranks, count}, {.skipped = skipped, .reorder = reorder});
          check(with_messages(schedule));
          const int between = ranks - 2;
          const auto passed = std::lround(between * (1 - skipped));
          if (passed == between) continue;
          CHECK(passes_of(schedule, 0) == count);
          CHECK(passes_of(schedule, ranks - 1) == count);
          for (int s = 1; s + 1 < ranks; ++s) {
            CHECK(passes_of(schedule, s) >= count * passed / between);
            CHECK(passes_of(schedule, s) <= (count * passed + between - 1) / between);
          }
          for (const auto& path : schedule.paths) {
            CHECK(static_cast<int>(path.size()) == passed + 2);
            CHECK((reorder || std::ranges::is_sorted(path)));
          }
          const auto timeline = simulate(schedule);
          for (int r = 0; r < ranks; ++r) CHECK(timeline.ranks[r].peak <= ranks - r);
        }
      }
    }
  }
}

TEST_CASE("pipeline paths: chosen ones take less time than random ones", "[pipeline]") {
  std::mt19937 random(3);
  const PipelineSize size{6, 18};
  const auto chosen = skip_pipe(size, {.skipped = 0.5});
  const double makespan = simulate(chosen).makespan;
  double sum = 0;
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<std::vector<int>> paths;
    for (int i = 0; i < size.microbatches; ++i) {
      std::vector<int> middle{1, 2, 3, 4};
      std::ranges::shuffle(middle, random);
      paths.push_back({0, middle[0], middle[1], 5});
    }
    const double other = simulate(along_paths(size, paths)).makespan;
    CHECK(makespan <= other);
    sum += other;
  }
  INFO("chosen " << makespan << ", random on average " << sum / 20 << ", 1F1B " << simulate(one_f_one_b(size)).makespan);
  CHECK(makespan < 0.95 * sum / 20);
  CHECK(makespan == 63);  // as docs/pipeline.md says
  CHECK(simulate(one_f_one_b(size)).makespan == 69);
}

TEST_CASE("pipeline paths: one device's losses and gradients", "[pipeline]") {
  for (const int ranks : {3, 4}) {
    for (const double skipped : {0.0, 0.5, 1.0}) {
      CAPTURE(ranks, skipped);
      check_runs(skip_pipe({ranks, 6}, {.skipped = skipped}));
    }
  }
  check_runs(along_paths({4, 4}, {{0, 2, 1, 3}, {0, 1, 3}, {0, 3}, {0, 1, 2, 3}}));
  check_runs(skip_pipe({4, 6}, {.skipped = 0.5}), "shm");
  check_runs(skip_pipe({4, 6}, {.skipped = 0.5}), "gloo");
}

TEST_CASE("pipeline paths: what is refused", "[pipeline][errors]") {
  CHECK_THROWS_WITH(skip_pipe({4, 4}, {.skipped = 1.5}), says("a share of 1.5; expected 0 to 1"));
  CHECK_THROWS_WITH(skip_pipe({4, 4, 2}), says("skip_pipe got 4 ranks, 4 microbatches and 2 stages of a rank"));
  CHECK_THROWS_WITH(along_paths({3, 2}, {{0, 2}}), says("along_paths got 1 paths of 2 microbatches"));
  CHECK_THROWS_WITH(along_paths({3, 1}, {{0, 3}}), says("got stage 3 of 3"));
  CHECK_THROWS_WITH(along_paths({3, 1}, {{0, 1, 1}}), says("passes stage 1; expected each of 3 stages once at most"));
  auto schedule = along_paths({3, 2}, {{0, 2}, {0, 1, 2}});
  schedule.ranks[1].insert(schedule.ranks[1].begin(), {1, Kind::F, 0});
  CHECK_THROWS_WITH(check(schedule), says("1F0") && says("microbatch 0 does not pass stage 1"));
  schedule = along_paths({3, 2}, {{0, 2}, {0, 1, 2}});
  schedule.ranks[1].clear();
  CHECK_THROWS_WITH(check(schedule), says("1F1 is missing: stage 1 never runs microbatch 1"));
  schedule = along_paths({3, 2}, {{0, 2}, {0, 1, 2}});
  schedule.paths.pop_back();
  CHECK_THROWS_WITH(check(schedule), says("has 1 paths of 2 microbatches"));
}

TEST_CASE("pipeline encoder: it fills the gaps and moves nothing", "[pipeline]") {
  for (const std::string name : {"gpipe", "1f1b", "interleaved", "zb1p", "zbv"}) {
    for (const int ranks : {2, 4, 8}) {
      for (const std::vector<int>& encoder : {std::vector{ranks - 1}, {ranks / 2, ranks - 1}, {0, ranks - 1}}) {
        CAPTURE(name, ranks, encoder);
        const auto model = make_schedule(name, {.ranks = ranks, .microbatches = 2 * ranks});
        const auto alone = simulate(model);
        Costs costs;
        costs.stages.assign(model.stages() + encoder.size(), {});
        for (size_t i = 0; i < encoder.size(); ++i) costs.stages[i] = {0.5, 0.25, 0.25};
        const auto [schedule, moved, makespan, one_by_one] = with_encoder(model, encoder, costs);
        check(with_messages(schedule));

        const auto together = simulate(schedule, costs);
        CHECK(together.makespan <= makespan + 1e-9);
        CHECK(makespan < one_by_one - 1e-9);
        const int count = static_cast<int>(encoder.size());
        for (int r = 0; r < ranks; ++r) {
          size_t i = 0;  // of the model's
          for (size_t j = 0; j < schedule.ranks[r].size(); ++j) {
            auto action = schedule.ranks[r][j];
            if (action.stage < count) continue;
            action.stage -= count;
            CHECK(text(action) == text(model.ranks[r][i]));
            CHECK(together.actions[r][j].start <= alone.actions[r][i].start + moved + 1e-9);
            ++i;
          }
          CHECK(i == model.ranks[r].size());
        }
      }
    }
  }
}

TEST_CASE("pipeline encoder: the times of the documentation", "[pipeline]") {
  Costs costs{.stages = std::vector<StageCost>(6)};
  costs.stages[0] = costs.stages[1] = {0.5, 0.25, 0.25};
  const auto found = with_encoder(one_f_one_b({4, 16}), {2, 3}, costs);
  CHECK(found.makespan == Approx(67).margin(0.01));
  CHECK(found.one_by_one == 74);
}

TEST_CASE("pipeline encoder: one device's losses and gradients", "[pipeline]") {
  check_runs(with_encoder(one_f_one_b({2, 4}), {1}).schedule);
  check_runs(with_encoder(make_schedule("zbv", {.ranks = 2, .microbatches = 6}), {0, 1}).schedule);
  check_runs(with_encoder(one_f_one_b({3, 6}), {1, 2}).schedule, "shm");
}

TEST_CASE("pipeline encoder: what is refused", "[pipeline][errors]") {
  CHECK_THROWS_WITH(with_encoder(one_f_one_b({2, 4}), {2}), says("on rank 2; expected one of 2 ranks"));
  CHECK_THROWS_WITH(with_encoder(with_messages(one_f_one_b({2, 4})), {1}), says("with messages, edges or paths"));
  CHECK_THROWS_WITH(with_encoder(one_f_one_b({2, 4}), {1}, {.stages = {{}, {}}}), says("3 stages, and there are costs of 2"));
}
