// Tells backward passes apart.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#pragma GCC visibility push(default)

namespace dtensor {

// Identifies the backward pass that runs on this thread; null outside of one.
inline const void* current_backward() { return torch::autograd::get_current_graph_task_exec_info(); }

}  // namespace dtensor

#pragma GCC visibility pop
