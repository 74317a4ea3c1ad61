// Differences between libtorch versions, and the one place where the dispatch key is chosen.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torch/version.h>

#pragma GCC visibility push(default)

namespace dtensor {

// Sits below autograd and above every backend. libtorch 2.x also uses it for its C++ FakeTensor mode, which therefore cannot be
// combined with DTensors.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::Fake;

}  // namespace dtensor

#define DTENSOR_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#pragma GCC visibility pop
