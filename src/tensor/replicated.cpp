#include <dtensor/tensor/replicated.hpp>

#include "src/dispatch/replicated.hpp"

namespace dtensor {

std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh) { return dispatch::ranks_that_differ(tensor, mesh); }

}  // namespace dtensor
