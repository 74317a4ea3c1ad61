#include "src/launch/unfused.hpp"

#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

namespace dtensor::detail {

void run_scripts_unfused() { torch::jit::setTensorExprFuserEnabled(false); }

}  // namespace dtensor::detail
