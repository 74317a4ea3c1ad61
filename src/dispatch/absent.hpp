// Tensors elsewhere: of a mesh that this rank is not in.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// A tensor of which this rank knows the layout only: its part is that of the mesh's first rank, on the meta device.
at::Tensor absent(const LayoutPtr& layout);

inline bool is_absent(const at::Tensor& tensor) {
  const auto* impl = as_dtensor(tensor);
  return impl && impl->values() == Values::absent;
}

// What `what` on such a tensor throws: what the tensor is, where its values are, and how to get them.
[[noreturn]] void refuse_absent(std::string_view what, const Layout& layout);

// Whether a call is of an absent mesh, so that its results are worked out from sizes alone. Throws where it must not be made here: outside
// of dt::on and of a backward pass, or inside of dt::on with tensors of another mesh.
bool is_worked_out(const OpInfo& info, const Stack& stack, size_t begin);

// Runs the lowering of a random operator on an absent tensor, which draws nothing but leaves this rank's generator as the others' are.
// False where the operator draws nothing. Throws where what it draws hangs on values.
bool skip_draws(const Decision& decision, rules::LocalCall& call);

}  // namespace dtensor::dispatch
