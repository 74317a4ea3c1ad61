// Fully sharded data parallelism (ZeRO): parameters, gradients and optimizer states are sharded over a mesh dimension, and a unit of
// parameters is gathered while it is used.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Optional.h>

#include <memory>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace torch::nn {
class Module;
}

namespace dtensor {

struct FullyShardOptions {
  // The modules that are units, by patterns of their names as in a Plan ("layers.*"). All other parameters are one more unit. If empty,
  // units are the elements of the outermost lists (ModuleList, Sequential); or, with `unit_bytes`, consecutive modules of up to that size
  // together.
  std::vector<std::string> units;
  int64_t unit_bytes = 0;

  // True, ZeRO-3: a unit is freed when others are used. False, ZeRO-2: it stays whole until its gradients are there.
  bool reshard_after_forward = true;
  // True, ZeRO-1: gradients stay whole, and are reduced when they are read.
  bool reduce_at_read = false;
  // With reshard_after_forward: how many units are whole at once, including the one that is gathered ahead. 1: nothing is gathered ahead.
  int64_t max_whole_units = 2;

  // The dtype in which a unit is gathered when a parameter is used in that dtype: under autocast, or by weight.to(dtype). Other uses gather
  // that parameter alone, and the counters of FullyShard do not count it.
  c10::optional<c10::ScalarType> param_dtype;
  // The dtype in which gradients are reduced. Unset: the parameters' dtype.
  c10::optional<c10::ScalarType> reduce_dtype;
  // Gradients are divided by this. 1: they are those of one device.
  double gradient_divide_factor = 1;

  // Keeps parameters, gradients and optimizer states in the host's memory (pinned, where there is CUDA); the optimizer computes there. A
  // unit is copied to the mesh's device when it is gathered. No effect on a mesh of the CPU.
  bool cpu_offload = false;

  // Parameters are cut only between blocks of this many elements (tiles of a quantization).
  int64_t block = 1;
};

// The units that fully_shard made, and their counters. Cheap to copy; the parameters keep the units alive.
class FullyShard {
 public:
  struct Unit {
    std::string name;
    std::vector<std::string> parameters;
    c10::ScalarType dtype;
    int64_t elements;  // of the parameters, after sharding by other mesh dimensions
    int64_t piece;     // elements of the flat buffer on each rank
    double padding;    // the share of the buffer that belongs to no parameter
  };
  std::vector<Unit> units() const;

  // Counters of this rank: bytes, and calls since the beginning.
  int64_t whole_bytes() const;       // of gathered parameters that exist now
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

// Shards the parameters of `module` over the dimensions of `mesh`, which have names of dimensions of the parameters' own mesh. One
// dimension shards; of two, the first replicates (HSDP). The module must have been built inside Spmd. Parameters that are in units already
// stay in them, so blocks may be wrapped before the whole model. If parallelize_module shards parameters on other mesh dimensions, before
// or after, their shards are sharded further.
//
// Parameters are views of one flat buffer per unit and dtype. When an operator needs a parameter whole, in forward or backward, every rank
// gathers its unit (one all_gather), and then the next unit in the order of the previous pass. Gradients are written to a flat buffer; one
// reduce_scatter per unit and backward brings them to the parameters' ranks. Inside NoSync gradients stay whole and are not reduced.
// Frozen, tied and unused parameters, several forwards before a backward, and another order of use each step give the results of one
// device.
//
// On ranks that are not in the parameters' mesh (see dt::on), parameters are absent. There they only get the same layouts, and nothing is
// gathered.
//
// Communicates nothing itself. Throws, before it changes anything, for plain parameters, parameters on two meshes, a mesh dimension that
// shards one already, a pattern that matches no module, a module in two units, and a module with nothing left to shard.
FullyShard fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

// Makes one unit of the parameters of all these modules. Do not set `options.units` and `unit_bytes`.
FullyShard fully_shard(const std::vector<torch::nn::Module*>& unit, const DeviceMesh& mesh, const FullyShardOptions& options = {});

// Gathers the units of these parameters and keeps them whole until reshard(), over any number of forwards and backwards: so they travel
// once, and max_whole_units does not count them. What is written into such a parameter frees its unit until the next use. Parameters of no
// unit are left alone. Each unshard() wants its own reshard(); every rank of the mesh calls both.
//
// Communicates one all_gather for each unit that is not whole, and does not wait for it.
void unshard(const std::vector<at::Tensor>& parameters);

// Frees the units that no other unshard() keeps. Communicates nothing.
void reshard(const std::vector<at::Tensor>& parameters);

}  // namespace dtensor

#pragma GCC visibility pop
