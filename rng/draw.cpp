#include "rng/draw.hpp"

namespace dtensor::rng {

void Draw::fill(const at::Tensor& to, const at::Generator& generator) const {
  auto stack = arguments;
  stack[0] = to;
  stack[*op.schema().argumentIndexWithName("generator")] = generator;
  op.callBoxed(stack);
}

Draw draw_of(const c10::OperatorHandle& op, std::initializer_list<c10::IValue> between, const at::TensorOptions& options) {
  Draw draw{op, {c10::IValue()}, options};
  draw.arguments.insert(draw.arguments.end(), between);
  draw.arguments.emplace_back();
  return draw;
}

}  // namespace dtensor::rng
