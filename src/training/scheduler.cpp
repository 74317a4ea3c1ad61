#include <dtensor/training/lr.hpp>

#include <dtensor/base/error.hpp>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

namespace dtensor::lr {

namespace {

constexpr const char* kTag = "lr::Scheduler";

std::vector<Schedule> for_each_group(const torch::optim::Optimizer& optimizer, const Schedule& schedule) {
  return std::vector<Schedule>(optimizer.param_groups().size(), schedule);
}

}  // namespace

Scheduler::Scheduler(torch::optim::Optimizer& optimizer, Schedule schedule) : Scheduler(optimizer, for_each_group(optimizer, schedule)) {}

Scheduler::Scheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules)
    : optimizer_(optimizer), schedules_(std::move(schedules)), base_(rates()) {
  require(schedules_.size() == base_.size(), kTag, "got {} schedules; expected one for each of the {} groups of parameters",
          schedules_.size(), base_.size());
  for (const auto& schedule : schedules_) require(static_cast<bool>(schedule), kTag, "a schedule is empty");
  set_step(0);
}

void Scheduler::set_step(int64_t step) {
  require(step >= 0, kTag, "got step {}; expected a number that is not negative", step);
  require(optimizer_.param_groups().size() == base_.size(), kTag,
          "the optimizer has {} groups now, and had {}; hint: make the scheduler after them", optimizer_.param_groups().size(),
          base_.size());
  step_ = step;
  for (size_t i = 0; i < base_.size(); ++i) optimizer_.param_groups()[i].options().set_lr(base_[i] * schedules_[i](step));
}

std::vector<double> Scheduler::rates() const {
  std::vector<double> rates;
  for (const auto& group : optimizer_.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void Scheduler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step_));
  archive.write("base_rates", c10::IValue(base_));
}

void Scheduler::load(torch::serialize::InputArchive& archive) {
  c10::IValue step, base;
  archive.read("step", step);
  archive.read("base_rates", base);
  const auto rates = base.toDoubleVector();
  require(rates.size() == base_.size(), kTag, "the saved scheduler had {} groups; expected {}", rates.size(), base_.size());
  base_ = rates;
  set_step(step.toInt());
}

}  // namespace dtensor::lr
