// Turns the fuser of TorchScript off.
#pragma once

namespace dtensor::detail {

// Makes TorchScript run modules operator by operator, for the whole process. Its fused kernels read their inputs by pointer, and a sharded
// tensor has no memory to point to.
void run_scripts_unfused();

}  // namespace dtensor::detail
