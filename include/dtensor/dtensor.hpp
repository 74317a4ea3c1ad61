// The core of dtensor, plans and the training kit. Include it after (or without) <torch/torch.h>. These are not in it: include what you
// use.
//
//   <dtensor/collectives.hpp>              collectives on plain tensors
//   <dtensor/data/batches.hpp>             batches of a DataLoader
//   <dtensor/checkpoint/checkpoint.hpp>    dt::save and dt::load of checkpoints; manager.hpp beside it saves and resumes by itself
//   <dtensor/checkpoint/foreign.hpp>       checkpoints of other libraries
//   <dtensor/checkpoint/torch_files.hpp>   dt::save and dt::load of the files of torch::save
//   <dtensor/generate/engine.hpp>          generation
//   <dtensor/gradients/leaf_hooks.hpp>     hooks of gradients
//   <dtensor/gradients/saved_tensors.hpp>  hooks of the tensors that autograd saves
//   <dtensor/nn/...>                       layers
//   <dtensor/optim/...>                    optimizers
//   <dtensor/parallel/context/...>         attention over cut sequences: context_parallel.hpp
//   <dtensor/pipeline.hpp>                 pipelines; schedules by themselves: <dtensor/parallel/pipeline/schedules.hpp>
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/comm/communicator.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/dispatch/replication_debug.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/layout.hpp>
#include <dtensor/mesh/placement.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/observe/comm_debug.hpp>
#include <dtensor/observe/explain.hpp>
#include <dtensor/observe/scope.hpp>
#include <dtensor/observe/trace.hpp>
#include <dtensor/observe/visualize.hpp>
#include <dtensor/parallel/fully_shard.hpp>
#include <dtensor/parallel/marks.hpp>
#include <dtensor/parallel/overlap.hpp>
#include <dtensor/parallel/parallelize.hpp>
#include <dtensor/parallel/plans.hpp>
#include <dtensor/redistribute/between_meshes.hpp>
#include <dtensor/redistribute/redistribute.hpp>
#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/custom_op.hpp>
#include <dtensor/tensor/on.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>
#include <dtensor/training/checkpoint.hpp>
#include <dtensor/training/clip.hpp>
#include <dtensor/training/grad_scaler.hpp>
#include <dtensor/training/lr.hpp>
#include <dtensor/version.hpp>
