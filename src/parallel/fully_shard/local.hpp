#pragma once

#include <dtensor/compat.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dtensor::fsdp {

// Operators on plain tensors that neither Spmd nor autograd sees.
class BelowDispatch {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::DispatchKeySet(kDTensorKey) | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

}  // namespace dtensor::fsdp
