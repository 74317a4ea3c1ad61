// Deferred initialization: construct a module without memory, then fill only this rank's shards.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/Tensor.h>

#include <memory>

#pragma GCC visibility push(default)

namespace torch::nn {
class Module;
}

namespace dtensor {

// While it lives, this thread is as if inside Spmd on `mesh`, but operators that make and change tensors are recorded instead of run. The
// tensors take no memory. They have sizes, dtypes and layouts (Replicate, until parallelize_module or redistribute_ says otherwise).
// Generators go on as if the operators had run. A value that the program asks for (item(), nonzero(), ...) is computed at once, whole, as
// on one device.
//
// Regions nest, and all regions of a thread are one. They end in any order, as those of Spmd do.
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

  // Whether the calling thread is inside such a region.
  static bool active();

 private:
  Spmd spmd_;
  std::shared_ptr<detail::Region> recording_;
};

// Whether a tensor has no values yet.
bool is_deferred(const at::Tensor& tensor);

// Gives the deferred parameters and buffers of `module` their values, which are those of one device. Each rank gets its shard in the
// tensor's layout, and draws and computes only that where the operators allow it. The tensors' gradients, and tensors that share memory
// with them, get their values too; other deferred tensors stay deferred.
//
// Takes memory for the shards and for intermediate results. Every rank of the mesh calls it alike. Communicates only where an operator of
// the initialization has to. When it throws, nothing has changed.
void materialize(torch::nn::Module& module);
void materialize(c10::ArrayRef<at::Tensor> tensors);

// For a dry run, instead of materialize(): the module stays without values. Its local tensors are on the meta device. Operators work out
// sizes and layouts, and collectives leave their records and move nothing (on the fake transport). Make inputs in the same way:
// dt::empty(sizes, mesh, placements, torch::kMeta). Gradients, optimizers and fully_shard work. Asking for a value (item()) is an error.
void forget_values(torch::nn::Module& module);
void forget_values(c10::ArrayRef<at::Tensor> tensors);

// The bytes that tensors without values would take: those that the calling thread's rank has made, on any thread. Counting begins with the
// first call of meta_memory() of any rank.
struct MetaMemory {
  int64_t now = 0, peak = 0;
};
MetaMemory meta_memory();
// Starts to measure the peak anew.
void reset_meta_memory_peak();

}  // namespace dtensor

#pragma GCC visibility pop
