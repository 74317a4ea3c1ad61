// Refuses set_data between a plain and a distributed tensor: libtorch would copy the metadata of one into the other, which has another
// class.
#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/base/error.hpp>

#include <torch/library.h>

namespace dtensor::dispatch {

namespace {

bool may_take_data(const at::Tensor& self, const at::Tensor& from) {
  require((as_dtensor(self) != nullptr) == (as_dtensor(from) != nullptr), "set_data",
          "a {} tensor cannot take the data of a {} one; hint: modules are cloned in the dt::Spmd region that they were made in; otherwise "
          "distribute_tensor or full_tensor first",
          as_dtensor(self) ? "distributed" : "plain", as_dtensor(from) ? "distributed" : "plain");
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

}  // namespace

// Set_data asks it first. (What libtorch registered for all keys goes before what is registered for all of autograd's.)
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { library.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_take_data)); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_take_data)); }

}  // namespace dtensor::dispatch
