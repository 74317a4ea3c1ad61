// Fourier transforms. They are linear, and need the transformed dims whole.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

// The transformed dims are whole. `last` gives the length of the last transformed dim of the result.
RulePtr transform(int64_t (*last)(const Call&, int64_t)) {
  return family([last](const Call& call) {
    auto in = lettered(call.operands[0].sizes());
    const auto dims = call.ints_arg("dim");
    for (const auto dim : dims) in[wrap_dim(dim, call.operands[0].ndim())].letter = kWhole;
    auto out = in;
    if (!dims.empty()) {
      auto& size = out[wrap_dim(dims.back(), call.operands[0].ndim())].size;
      size = last(call, size);
    }
    return Structure{{in}, {out}, {}, {kSums, {{0}}}};
  });
}

constexpr auto kWhy = "a transform needs its dims whole; it is linear, and the others are free";
const Register complex("aten::_fft_c2c", transform([](const Call&, int64_t size) { return size; }), kWhy);
const Register from_real("aten::_fft_r2c", transform([](const Call& call, int64_t size) {
                           return call.bool_arg("onesided") ? size / 2 + 1 : size;
                         }), kWhy);
const Register to_real("aten::_fft_c2r", transform([](const Call& call, int64_t) { return call.int_arg("last_dim_size"); }), kWhy);

}  // namespace
}  // namespace dtensor::rules
