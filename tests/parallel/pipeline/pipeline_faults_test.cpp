// CSV files with a fault, run on ranks: refused on every rank, or a legal schedule that gives the numbers of one device.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"
#include "tests/support/pipeline_support.hpp"
#include "tests/support/words_of.hpp"

#include <dtensor/parallel/pipeline/runner.hpp>

#include <torch/torch.h>

#include <cstdlib>

namespace dtensor::pipelining::test {

namespace {

using dtensor::test::fractions;
using dtensor::test::on_ranks;
using dtensor::test::words_of;

constexpr int64_t kDim = 4;

struct Faulty {
  std::string csv;
  std::string refusal;  // empty: it is legal
};

// Calls f for each fault of small schedules on so many ranks.
template <class F>
void for_each_small_fault(int ranks, int microbatches, F f) {
  for (const auto& schedule : every_schedule(ranks, microbatches, 2)) {
    for (const auto& form : {schedule, with_messages(schedule)})
      for_each_fault(form, [&](const Schedule& changed, const std::vector<std::string>&) { f(changed); });
  }
}

// About `count` of these, half of them legal, the same in each run.
std::vector<Faulty> faults_of(int ranks, int microbatches, size_t count) {
  size_t all = 0, next = 0;
  for_each_small_fault(ranks, microbatches, [&](const Schedule&) { ++all; });
  const auto every = std::max<size_t>(1, all / (20 * count));
  std::vector<Faulty> legal, refused;
  for_each_small_fault(ranks, microbatches, [&](const Schedule& changed) {
    if (next++ % every != 0) return;
    auto csv = to_csv(changed);
    auto refusal = words_of<Error>([&] { check(from_csv(csv)); });
    (refusal.empty() ? legal : refused).push_back({std::move(csv), std::move(refusal)});
  });
  std::vector<Faulty> chosen;
  for (const auto* list : {&legal, &refused}) {
    const auto step = std::max<size_t>(1, list->size() / std::max<size_t>(1, count / 2));
    for (size_t i = 0; i < list->size(); i += step) chosen.push_back((*list)[i]);
  }
  return chosen;
}

at::Tensor one_stage(const at::Tensor& x, const at::Tensor& weight) {
  return x + torch::dropout(torch::tanh(at::matmul(x, weight)), 0.25, true);
}

at::Tensor loss_of_stage(const at::Tensor& y) { return y.square().mean(); }

at::Tensor weight_of(int stage) { return fractions({kDim, kDim}, stage).mul(0.3); }
at::Tensor input_of(int microbatch) { return fractions({2, kDim}, 10 + microbatch); }

// One device's losses, and the gradients of each stage for each microbatch.
struct Numbers {
  std::vector<at::Tensor> losses;
  std::vector<std::vector<at::Tensor>> gradients;
};

Numbers on_one_device(int stages, int microbatches) {
  torch::manual_seed(7);
  Numbers result;
  result.gradients.resize(stages);
  std::vector<at::Tensor> weights;
  for (int s = 0; s < stages; ++s) weights.push_back(weight_of(s).requires_grad_());
  for (int i = 0; i < microbatches; ++i) {
    auto x = input_of(i);
    for (const auto& weight : weights) x = one_stage(x, weight);
    const auto loss = loss_of_stage(x);
    loss.backward();
    result.losses.push_back(loss.detach());
    for (int s = 0; s < stages; ++s) result.gradients[s].push_back(std::exchange(weights[s].mutable_grad(), at::Tensor()));
  }
  return result;
}

// Of a stage, added up in the order in which the schedule computes them.
at::Tensor gradient_of(const Numbers& numbers, const Schedule& schedule, int stage) {
  at::Tensor sum;
  for (const auto& action : schedule.ranks[schedule.rank_of_stage[stage]]) {
    for (const auto& part : Parts(action)) {
      if (part.stage != stage || (part.kind != Kind::B && part.kind != Kind::W)) continue;
      const auto& one = numbers.gradients[stage][part.microbatch];
      sum = sum.defined() ? sum + one : one;
    }
  }
  return sum;
}

// Two steps: the first one learns what the stages draw.
void check_runs(const DeviceMesh& mesh, const std::string& csv, const Numbers& expected) {
  const auto schedule = from_csv(csv);
  const auto own = mesh.slice("pp", mesh.coordinate(0));
  std::vector<at::Tensor> weights;
  std::vector<StageForward> forwards;
  std::vector<TensorVector> inputs;
  for (int s = 0; s < schedule.stages(); ++s) {
    weights.push_back(at::Tensor(distribute_tensor(weight_of(s), own, {replicate()})).detach().requires_grad_());
    forwards.emplace_back([weight = weights.back()](const TensorVector& x) { return TensorVector{one_stage(x[0], weight)}; });
  }
  for (int i = 0; i < schedule.microbatches; ++i) inputs.push_back({input_of(i)});
  Runner runner({mesh, "pp"}, schedule, forwards);
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(7);
    for (auto& weight : weights) weight.mutable_grad() = at::Tensor();
    const auto losses = runner.step(inputs, [](const TensorVector& y, int) { return loss_of_stage(y[0]); });
    for (size_t i = 0; i < losses.size(); ++i)
      require(full_tensor(losses[i]).equal(expected.losses[i]), "test", "step {}: loss {} differs", step, i);
    for (int s = 0; s < schedule.stages(); ++s) {
      if (!runner.has(s)) continue;
      require(full_tensor(weights[s].grad()).equal(gradient_of(expected, schedule, s)), "test", "step {}: gradient {} differs", step, s);
    }
  }
}

void check_fault(const DeviceMesh& mesh, const Faulty& fault, int stages, const Numbers& expected) {
  if (fault.refusal.empty()) return check_runs(mesh, fault.csv, expected);
  const StageForward same = [](const TensorVector& x) { return x; };
  const auto refusal = words_of<Error>([&] { Runner({mesh, "pp"}, from_csv(fault.csv), std::vector<StageForward>(stages, same)); });
  require(refusal.starts_with(fault.refusal), "test", "expected the refusal '{}'; got '{}'", fault.refusal, refusal);
}

}  // namespace

// All of them (60,000, a quarter of an hour): DTENSOR_TEST_CASES=100000 build/tests/dtensor-tests "pipeline faults*".
TEST_CASE("pipeline faults: a changed file is refused on every rank or gives the numbers of one device", "[pipeline]") {
  const char* asked = std::getenv("DTENSOR_TEST_CASES");
  const size_t count = asked ? std::max(1ul, std::strtoul(asked, nullptr, 10)) : 100;
  for (const auto& [ranks, microbatches] : {std::pair{1, 2}, {2, 1}, {2, 3}, {3, 2}}) {
    const auto faults = faults_of(ranks, microbatches, count);
    std::map<int, Numbers> expected;
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      std::vector<Faulty> tried;
      const size_t step = transport == "threads" ? 1 : 10;
      for (size_t i = 0; i < faults.size(); i += step) tried.push_back(faults[i]);
      for (const auto& fault : tried) {
        const int stages = from_csv(fault.csv).stages();
        if (expected.count(stages) == 0) expected[stages] = on_one_device(stages, microbatches);
      }
      CAPTURE(ranks, microbatches, transport);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&, ranks = ranks](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"pp"});
            for (const auto& fault : tried) {
              try {
                const int stages = from_csv(fault.csv).stages();
                check_fault(mesh, fault, stages, expected.at(stages));
              } catch (const Error& error) {
                fail("test", "{}\n{}", fault.csv, error.what_without_backtrace());
              }
            }
          },
          transport));
    }
  }
}

}  // namespace dtensor::pipelining::test
