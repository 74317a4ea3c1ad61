// Operators that join, repeat or rearrange.
#include "sketch.hpp"

namespace dtensor::fuzz {

namespace {

// Two or three tensors of one dtype; args: dim. `equal`: of the same sizes, else they may differ along the dim.
Op join(std::string name, bool equal, std::function<at::Tensor(const Tensors&, int64_t)> run) {
  return {std::move(name), keeps,
          [=](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(with_dims(1, 4))};
            if (step.in[0] < 0) return false;
            const auto x = sketch.at(step.in[0]);
            step.args = {sketch.dim(x)};
            const auto count = sketch.random().between(1, 3);
            for (int64_t i = 1; i < count; ++i) {
              auto sizes = x.sizes().vec();
              auto& length = sizes[step.args[0] < 0 ? step.args[0] + x.dim() : step.args[0]];
              if (!equal && sketch.random().chance(50)) length = sketch.random().between(1, 5);
              step.in.push_back(sketch.of_sizes(sizes, x));
            }
            return true;
          },
          [=](const Tensors& in, const Ints& a) { return Tensors{run(in, a[0])}; }};
}

Op change(std::string name, int64_t dims, DrawArgs args, std::function<at::Tensor(T, const Ints&)> run) {
  return with_args(std::move(name), keeps, with_dims(dims, 5), std::move(args), std::move(run));
}

bool number_and_dim(Sketch& sketch, T x, Ints& args) {
  args = {sketch.random().between(-3, 3), sketch.dim(x)};
  return true;
}

bool repeats(Sketch& sketch, T x, Ints& args) {
  args.assign(x.dim(), 1);
  for (auto& count : args) count = sketch.random().one_of({1, 1, 2, 3});
  if (x.dim() < 4 && sketch.random().chance(30)) args.insert(args.begin(), 2);
  return true;
}

bool padding(Sketch& sketch, T x, Ints& args) {
  args.resize(2 * sketch.random().between(1, std::min<int64_t>(2, x.dim())));
  for (auto& count : args) count = sketch.random().between(0, 2);
  return true;
}

}  // namespace

void add_joins(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      join("cat", false, [](const Tensors& x, int64_t d) { return at::cat(x, d); }),
      join("stack", true, [](const Tensors& x, int64_t d) { return at::stack(x, d); }),
      join("hstack", true, [](const Tensors& x, int64_t) { return at::hstack(x); }),
      change("repeat", 0, repeats, [](T x, const Ints& a) { return x.repeat(a); }),
      change("tile", 0, repeats, [](T x, const Ints& a) { return at::tile(x, a); }),
      change("roll", 1, number_and_dim, [](T x, const Ints& a) { return x.roll(a[0], a[1]); }),
      change("flip", 1, number_and_dim, [](T x, const Ints& a) { return x.flip({a[1]}); }),
      change("rot90", 2, {}, [](T x, const Ints&) { return x.rot90(1, {0, 1}); }),
      change("repeat_interleave", 1, number_and_dim, [](T x, const Ints& a) { return x.repeat_interleave(1 + std::abs(a[0]), a[1]); }),
      change("tril", 2, number_and_dim, [](T x, const Ints& a) { return x.tril(a[0]); }),
      change("triu", 2, number_and_dim, [](T x, const Ints& a) { return x.triu(a[0]); }),
      change("diag_embed", 1, number_and_dim, [](T x, const Ints& a) { return at::diag_embed(x, a[0]); }),
      change("pad", 1, padding, [](T x, const Ints& a) { return at::constant_pad_nd(x, a, 2); }),
      change("meshgrid", 1, {},
             [](T x, const Ints&) { return at::meshgrid({x.flatten().slice(0, 0, 4), x.flatten().slice(0, 0, 3)}, "ij")[0]; }),
  });
}

}  // namespace dtensor::fuzz
