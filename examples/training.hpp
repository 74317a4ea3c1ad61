// What the training programs share around their loops.
#pragma once

#include "log.hpp"
#include "loss_plot.hpp"
#include "train_options.hpp"

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/training/lr.hpp>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

// Linear warm-up over the first tenth, then a cosine down to a tenth of the largest rate.
dtensor::lr::Schedule learning_rate(int64_t steps);

// Elements of the parameters: all, and those that this rank holds.
std::pair<int64_t, int64_t> count_parameters(const std::vector<at::Tensor>& parameters);

// Copies of the parameters, or of their gradients, gathered.
std::vector<at::Tensor> whole_parameters(const torch::nn::Module& model);
std::vector<at::Tensor> whole_gradients(const torch::nn::Module& model);

// What a run needs to go on, in the files BEGIN.model.pt, BEGIN.optimizer.pt and BEGIN.schedule.pt, which any mesh reads.
class Saved {
 public:
  Saved(torch::nn::Module& model, torch::optim::Optimizer& optimizer, dtensor::lr::Scheduler& scheduler)
      : model_(model), optimizer_(optimizer), scheduler_(scheduler) {}
  // For --resume: reads the files and returns the step to go on with; 0 without.
  int64_t resume(const RunOptions& o);
  // For --save: writes the files when so many steps are done.
  void save(const RunOptions& o, int64_t steps) const;

 private:
  torch::nn::Module& model_;
  torch::optim::Optimizer& optimizer_;
  dtensor::lr::Scheduler& scheduler_;
};

// Trains from the seed on the mesh or, without one, on one device, and returns the losses. The log is rank 0's; others have none.
using Train = std::function<Curve(const std::optional<dtensor::DeviceMesh>& mesh, const std::string& name, StepLog* log)>;

// What a step has so many of ("tokens"), and what a loss is in.
struct Units {
  std::string item = "tokens", loss = "nats a byte";
};

// Launches the ranks and trains on the meshes of the options, one after the other, and for --compare on one device. `load` is called on
// every rank, and once more for one device. Returns the exit status: 1 when a difference is above --tolerance.
int train_on_meshes(int argc, char** argv, const RunOptions& o, const std::function<Train()>& load, const Units& units = {});
