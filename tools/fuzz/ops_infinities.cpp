// Operators that make or meet infinities, in programs that have them.
#include "sketch.hpp"

#include <cmath>

namespace dtensor::fuzz {

namespace {

// The entry, drawn only where values may be infinite.
Op infinite(Op op) {
  op.draw = [draw = std::move(op.draw)](Sketch& sketch, Step& step) { return sketch.infinities() && draw(sketch, step); };
  return op;
}

Op masks(std::string name, std::function<at::Tensor(T x, T mask)> run) {
  const auto draw = [](Sketch& sketch, Step& step) {
    if (!one(floating)(sketch, step)) return false;
    step.in.push_back(sketch.of_sizes(sketch.at(step.in[0]).sizes().vec(), at::empty({0}, at::kBool)));
    return true;
  };
  return infinite({std::move(name), keeps, draw, [=](const Tensors& in, const Ints&) { return Tensors{run(in[0], in[1])}; }});
}

// max - min along some dim
bool one_dim(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x), sketch.random().below(2)};
  return x.size(args[0]) > 0;
}

}  // namespace

void add_infinities(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      masks("masked_fill -inf", [](T x, T mask) { return x.masked_fill(mask, -INFINITY); }),
      masks("where inf", [](T x, T mask) { return at::where(mask, x, INFINITY); }),
      infinite(with_args("amax - amin", keeps, with_dims(1, 9, floating), one_dim,
                         [](T x, const Ints& a) { return x.amax(a[0], a[1] != 0) - x.amin(a[0], a[1] != 0); }, all_exact)),
      infinite(with_args("amax + 1", keeps, with_dims(1, 9, floating), one_dim,
                         [](T x, const Ints& a) { return x.amax(a[0], a[1] != 0) + 1; }, all_exact)),
      infinite(unary("x * inf", keeps, [](T x) { return x * INFINITY; }, apart_from({0}))),
      infinite(unary("x / 0", keeps, [](T x) { return x / 0; }, apart_from({0}))),
      infinite(unary("x / 0.0", keeps, [](T x) { return x / 0.0; }, apart_from({0}))),
      infinite(unary("x + inf", keeps, [](T x) { return x + INFINITY; })),
      infinite(unary("sum * inf", keeps, [](T x) { return x.sum() * INFINITY; }, all_exact)),
      infinite(binary("sum / b", rounds, [](T a, T b) { return a.sum() / b; }, all_exact, floating)),
      infinite(binary("sum * b", keeps, [](T a, T b) { return a.sum() * b; }, all_exact, floating)),
      infinite(binary("a / b", rounds, [](T a, T b) { return a / b; }, all_exact, floating)),
      infinite(binary("addcdiv 1", rounds, [](T a, T b) { return a.addcdiv(a, b); }, all_exact, floating)),
  });
}

}  // namespace dtensor::fuzz
