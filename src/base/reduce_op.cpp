#include <dtensor/base/reduce_op.hpp>

namespace dtensor {

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::avg: return "avg";
    case ReduceOp::product: return "product";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::norm2: return "norm2";
  }
  return "?";
}

}  // namespace dtensor
