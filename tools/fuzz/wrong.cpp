// An operator whose sharding rule is wrong, so that a test can see that the fuzzer finds such a thing.
#include "sketch.hpp"

#include <dtensor/rules/rule.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace dtensor::fuzz {

namespace {

// x less its mean along the last dim: needs that dim whole.
at::Tensor center(const at::Tensor& x) { return x - x.mean(-1, true); }

TORCH_LIBRARY(fuzz, library) {
  library.def("wrong(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(fuzz, CompositeExplicitAutograd, library) { library.impl("wrong", &center); }

const rules::Register kWrong("fuzz::wrong", rules::einsum("...d->...d"), "wrong on purpose: d is sharded, but its mean is taken");

at::Tensor wrong(T x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuzz::wrong", "").typed<at::Tensor(const at::Tensor&)>();
  c10::NoGradGuard guard;
  return op.call(x);
}

}  // namespace

Op wrong_operator() { return unary("fuzz::wrong", Effect::rounds, wrong, {}, with_dims(1, 9, floating)); }

}  // namespace dtensor::fuzz
