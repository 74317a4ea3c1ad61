// What the training programs share around their loops.
#pragma once

#include "log.hpp"
#include "loss_plot.hpp"
#include "train_options.hpp"

#include <dtensor/checkpoint/manager.hpp>
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
int64_t elements(const std::vector<at::Tensor>& parameters);
int64_t elements_here(const std::vector<at::Tensor>& parameters);

// Copies of the parameters, or of their gradients, gathered.
std::vector<at::Tensor> whole_parameters(const torch::nn::Module& model);
std::vector<at::Tensor> whole_gradients(const torch::nn::Module& model);

// --save, --every and --resume. Without --save nothing is written, and neither is on one device.
class Saved {
 public:
  Saved(dtensor::State state, const RunOptions& o, bool is_on_mesh);
  // Returns the step to go on with: 0 without --resume, and where that has nothing to go on from yet.
  int64_t resume();
  // Call it when so many steps are done. Returns false once the program was told to stop, and the state is saved.
  bool step(int64_t steps);

 private:
  dtensor::State state_;
  const RunOptions& o_;
  std::optional<dtensor::CheckpointManager> manager_;
};

// Trains from the seed on the mesh or, without one, on one device, and returns the losses. The log is rank 0's; others have none.
using Train = std::function<Curve(const std::optional<dtensor::DeviceMesh>& mesh, const std::string& name, StepLog* log)>;

// What a step has so many of ("tokens"), and what a loss is in.
struct Units {
  std::string item = "tokens", loss = "nats a byte";
};

// Runs `body` on the ranks of --ranks or, where there is none, as many as the first mesh has. Under a launcher neither counts. Returns the
// exit status.
int launch_on(int argc, char** argv, const std::vector<MeshOption>& meshes, const std::function<void(dtensor::World&)>& body);

// Launches the ranks and trains on the meshes of the options, one after the other, and for --compare on one device. `load` is called on
// every rank, and once more for one device. Returns the exit status: 1 when a difference is above --tolerance.
int train_on_meshes(int argc, char** argv, const RunOptions& o, const std::function<Train()>& load, const Units& units = {});
