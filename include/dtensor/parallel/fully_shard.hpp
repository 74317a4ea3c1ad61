// Fully sharded data parallelism (ZeRO): parameters, gradients and optimizer states are cut over a mesh dimension, and a unit of
// parameters is gathered while it is used.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/Optional.h>

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace dtensor {

struct FullyShardOptions {
  // Which modules are units, by patterns of their names as in a Plan ("layers.*"); what is in none of them is one more unit. Empty: the
  // elements of the outermost lists (ModuleList, Sequential), or, with `unit_bytes`, modules in order, together as long as they are no
  // larger.
  std::vector<std::string> units;
  int64_t unit_bytes = 0;

  // ZeRO-3: a unit is freed when others are used. False, ZeRO-2: it stays whole until its gradients are there.
  bool reshard_after_forward = true;
  // ZeRO-1: gradients stay whole, and are reduced when they are read.
  bool reduce_at_read = false;
  // With reshard_after_forward: how many units are whole at once, the one that is gathered ahead included. 1: none is.
  int64_t max_whole_units = 2;

  // What a unit is gathered as where the parameter is used so: under autocast, or weight.to(dtype). Other uses gather that parameter
  // alone, which the counters of FullyShard do not see.
  c10::optional<c10::ScalarType> param_dtype;
  // What gradients are reduced in. Unset: the parameters' dtype.
  c10::optional<c10::ScalarType> reduce_dtype;
  // Gradients are divided by it. 1: they are those of one device.
  double gradient_divide_factor = 1;

  // Parameters, gradients and what optimizers make like them are kept in the host's memory (pinned, where there is CUDA), and the optimizer
  // computes there; a unit is copied to the mesh's device when it is gathered. Nothing on a mesh of the CPU.
  bool cpu_offload = false;

  // Every parameter is cut in whole blocks of this many elements (tiles of a quantization).
  int64_t block = 1;
};

// What fully_shard made. Cheap to copy; the parameters keep the units alive.
class FullyShard {
 public:
  struct Unit {
    std::string name;
    std::vector<std::string> parameters;
    c10::ScalarType dtype;
    int64_t elements;  // of the parameters, as other mesh dimensions cut them
    int64_t piece;     // elements of the flat buffer that each rank has
    double padding;    // the share of the buffer that is of no parameter
  };
  std::vector<Unit> units() const;

  // Counters of this rank, in bytes and calls since the beginning.
  int64_t whole_bytes() const;       // of gathered parameters that are alive
  int64_t peak_whole_bytes() const;
  int64_t gathers() const;           // units gathered
  int64_t reductions() const;        // units' gradients reduced

  struct State;

 private:
  friend FullyShard fully_shard(const std::vector<torch::nn::Module*>&, const DeviceMesh&, const FullyShardOptions&);
  friend FullyShard fully_shard(torch::nn::Module&, const DeviceMesh&, const FullyShardOptions&);
  explicit FullyShard(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// Cuts the parameters of `module` over the dimensions of `mesh`, by name those of the mesh that they are on: one dimension cuts; of two
// the first replicates (HSDP). The module must have been built inside Spmd; parameters that are in units already are left to those, so
// blocks may be wrapped before the whole. Where parallelize_module cuts parameters on other mesh dimensions, before or after, their parts
// are cut.
//
// Parameters are views of one flat buffer per unit and dtype. Every rank gathers a unit (one all_gather) when an operator needs a
// parameter of it whole, in forward and backward, and ahead in the order of the pass before; gradients land in a flat buffer, and one
// reduce_scatter per unit and backward brings them where the parameters are. Inside NoSync gradients are kept whole and not reduced.
// Frozen, tied and unused parameters, several forwards before a backward, and another order of use each step are as on one device.
//
// Throws, before anything is changed, for plain parameters, parameters on two meshes, a mesh dimension that cuts one already, a pattern
// that matches no module, a module in two units, and a module with nothing left to shard. Communicates nothing.
FullyShard fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

// The parameters of all these modules as one unit; `options.units` and `unit_bytes` are not for this.
FullyShard fully_shard(const std::vector<torch::nn::Module*>& unit, const DeviceMesh& mesh, const FullyShardOptions& options = {});

}  // namespace dtensor
