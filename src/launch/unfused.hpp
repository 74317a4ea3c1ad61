#pragma once

namespace dtensor::detail {

// Has TorchScript run a module operator by operator. Its fused kernels read their inputs' memory by pointer, which a tensor that is cut
// does not have. For the whole process.
void run_scripts_unfused();

}  // namespace dtensor::detail
