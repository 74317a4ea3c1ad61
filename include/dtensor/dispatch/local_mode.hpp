// While LocalMode lives, operators of this thread run below autograd and skip dtensor's dispatch key: for code that works on local tensors.
#pragma once

#include <dtensor/base/compat.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>

#pragma GCC visibility push(default)

namespace dtensor {

class LocalMode {
 public:
  LocalMode() : guard_(c10::DispatchKeySet(kDTensorKey) | c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace dtensor

#pragma GCC visibility pop
