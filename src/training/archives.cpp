// What schedulers and scalers save. It is compiled because <torch/serialize/archive.h> would more than double the compile time of
// <dtensor/dtensor.hpp>.
#include <dtensor/training/grad_scaler.hpp>
#include <dtensor/training/lr.hpp>

#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

namespace dtensor {

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", c10::IValue(scale_));
  archive.write("growth_factor", c10::IValue(options_.growth_factor));
  archive.write("backoff_factor", c10::IValue(options_.backoff_factor));
  archive.write("growth_interval", c10::IValue(options_.growth_interval));
  archive.write("growth_tracker", c10::IValue(growth_tracker_));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* name) {
    c10::IValue value;
    archive.read(name, value);
    return value;
  };
  auto options = options_;
  options.init_scale = read("scale").toDouble();
  options.growth_factor = read("growth_factor").toDouble();
  options.backoff_factor = read("backoff_factor").toDouble();
  options.growth_interval = read("growth_interval").toInt();
  GradScaler loaded(options);  // which checks
  loaded.options_.init_scale = options_.init_scale;
  loaded.growth_tracker_ = read("growth_tracker").toInt();
  *this = std::move(loaded);
}

void lr::Scheduler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step_));
  archive.write("base_rates", c10::IValue(base_));
}

void lr::Scheduler::load(torch::serialize::InputArchive& archive) {
  c10::IValue step, base;
  archive.read("step", step);
  archive.read("base_rates", base);
  const auto rates = base.toDoubleVector();
  require(rates.size() == base_.size(), lr::detail::kScheduler, "the saved scheduler had {} groups; expected {}", rates.size(),
          base_.size());
  base_ = rates;
  set_step(step.toInt());
}

}  // namespace dtensor
