// Code that works on local tensors runs below autograd and past our own key.
#pragma once

#include <dtensor/base/compat.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dtensor {

class LocalMode {
 public:
  LocalMode() : guard_(c10::DispatchKeySet(kDTensorKey) | c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace dtensor
