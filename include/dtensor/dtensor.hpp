// The core of dtensor, plans and the training kit. Include it after (or without) <torch/torch.h>. What stands on it has headers of its own:
// <dtensor/collectives.hpp>, <dtensor/data/batches.hpp>, <dtensor/checkpoint/torch_files.hpp>, and those in dtensor/nn and dtensor/optim.
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
