// Softmax: every slice along `dim` by itself.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

const Register forward("aten::_softmax aten::_log_softmax aten::_safe_softmax", sliced("dim"),
                       "a slice's sum needs the whole slice; slices are independent");
const Register backward("aten::_softmax_backward_data aten::_log_softmax_backward_data", sliced("dim", {kSums, {{0}}}),
                        "as forward, and linear in the incoming gradient");

}  // namespace
}  // namespace dtensor::rules
