// Modules that are constructed without memory, and filled part by part.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/Tensor.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace dtensor {

// While it lives, in this thread, it is as inside Spmd on `mesh`, but what makes and changes tensors is written down, not done: they
// take no memory, and have sizes, dtypes and layouts (Replicate, until parallelize_module or redistribute_ says otherwise). Generators go
// on as if it were done. A value that is asked for (item(), nonzero(), ...) is computed for the moment, whole, as on one device.
// Nests; all regions of a thread are one. They end as those of Spmd do, in any order.
//
//   auto model = [&] { dt::DeferredInit deferred(mesh); return Llama(config); }();
//   dt::parallelize_module(*model, mesh, plan);
//   dt::materialize(*model);
class DeferredInit {
 public:
  explicit DeferredInit(const DeviceMesh& mesh);
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

  // Whether the calling thread is inside of one.
  static bool active();

 private:
  Spmd spmd_;
  std::shared_ptr<detail::Region> recording_;
};

// Whether the values of a tensor are not there yet.
bool is_deferred(const at::Tensor& tensor);

// Gives the parameters and buffers of `module` that are deferred their values, those of one device: this rank's part as they are laid
// out, drawn and computed in parts where the operators allow it. Their gradients and tensors that share memory with them get theirs too;
// other deferred ones stay so. Takes memory for the parts and for what is under way. Called on every rank of the mesh alike;
// communicates only where an operator of the initialization has to. When it throws, nothing has changed.
void materialize(torch::nn::Module& module);
void materialize(c10::ArrayRef<at::Tensor> tensors);

// Instead: the module stays without values, for a dry run. Its parts are on the meta device; operators work out sizes and layouts, and
// collectives leave their records and move nothing (on the fake transport). Inputs are made so too: dt::empty(sizes, mesh, placements,
// torch::kMeta). Gradients, optimizers and fully_shard work; a value that is asked for (item()) is an error.
void forget_values(torch::nn::Module& module);

// The bytes that tensors without values would take, in the whole process: since the first call, which begins to count.
struct MetaMemory {
  int64_t now = 0, peak = 0;
};
MetaMemory meta_memory();
// The peak is from now on.
void reset_meta_memory_peak();

}  // namespace dtensor
