// prelu of libtorch 1: one weight per channel (dim 1), or one for all channels. Since libtorch 2.0 prelu is pointwise.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

// Dims of the data and of the weight.
std::pair<Dims, Dims> dims_of(const Call& call) {
  const auto& self = *call.operand(call.argument_index("self"));
  const auto& weight = *call.operand(call.argument_index("weight"));
  const auto data = lettered(self.sizes());
  auto channels = without_letters(weight.sizes());
  const size_t channel = self.ndim() > 1 ? 1 : 0;
  if (weight.ndim() == 1 && weight.sizes()[0] > 1 && channel < data.size()) channels[0].letter = data[channel].letter;
  return {data, channels};
}

Structure forward(const Call& call) {
  const auto [data, channels] = dims_of(call);
  return {{data, channels}, {data}, {}, {}};
}

Structure backward(const Call& call) {
  const auto [data, channels] = dims_of(call);
  return {{data, data, channels}, {data, channels}, Placements(2, partial()), {kSums, {{0}}}};
}

const Register prelu("aten::prelu", family(forward), "pointwise; a channel's weight lies with the channel");
const Register gradient("aten::prelu_backward", family(backward), "linear in the incoming gradient; the weight's sums over all else");

}  // namespace
}  // namespace dtensor::rules
