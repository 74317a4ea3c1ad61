// All of dtensor. Include it after (or without) <torch/torch.h>.
#pragma once

#include <dtensor/comm/communicator.hpp>
#include <dtensor/custom_op.hpp>
#include <dtensor/debug/comm_debug.hpp>
#include <dtensor/debug/explain.hpp>
#include <dtensor/debug/visualize.hpp>
#include <dtensor/deferred_init.hpp>
#include <dtensor/device_mesh.hpp>
#include <dtensor/error.hpp>
#include <dtensor/flat_group.hpp>
#include <dtensor/layout.hpp>
#include <dtensor/parallel/fully_shard.hpp>
#include <dtensor/parallel/marks.hpp>
#include <dtensor/parallel/overlap.hpp>
#include <dtensor/parallel/parallelize.hpp>
#include <dtensor/parallel/plans.hpp>
#include <dtensor/placement.hpp>
#include <dtensor/random.hpp>
#include <dtensor/redistribute.hpp>
#include <dtensor/spmd.hpp>
#include <dtensor/tensor.hpp>
#include <dtensor/training/checkpoint.hpp>
#include <dtensor/training/clip.hpp>
#include <dtensor/training/grad_scaler.hpp>
#include <dtensor/training/lr.hpp>
#include <dtensor/world.hpp>
