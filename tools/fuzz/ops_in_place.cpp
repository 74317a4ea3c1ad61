// Operators that write their first operand; what is a view writes through.
#include "sketch.hpp"

namespace dtensor::fuzz {

namespace {

Op in_place(Op op) {
  op.in_place = true;
  op.weight = 9;
  return op;
}

Op write(std::string name, Effect effect, std::function<void(at::Tensor)> run, Accepts accepts = floating, Tame tame = {}) {
  return in_place({std::move(name), effect, one(std::move(accepts)),
                   [=](const Tensors& in, const Ints&) { run(in[0]); return Tensors{}; }, std::move(tame)});
}

Op write_with(std::string name, Effect effect, std::function<void(at::Tensor, T)> run, Accepts accepts = number) {
  return in_place({std::move(name), effect, two(std::move(accepts), true),
                   [=](const Tensors& in, const Ints&) { run(in[0], in[1]); return Tensors{}; }});
}

bool mask_for(Sketch& sketch, Step& step) {
  if (!one(number)(sketch, step)) return false;
  step.in.push_back(sketch.of_sizes(sketch.at(step.in[0]).sizes().vec(), at::empty({0}, at::kBool)));
  return true;
}

// Pairs of numbers, which can be seen as complex ones.
bool pairs(T x) { return floating(x) && x.dim() > 0 && x.size(-1) == 2 && x.stride(-1) == 1 && x.numel() > 0; }

at::Tensor conjugate(at::Tensor x) { return at::view_as_complex(x).conj(); }

}  // namespace

void add_in_place(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      write_with("add_", keeps, [](at::Tensor x, T y) { x.add_(y); }),
      write_with("sub_ alpha", keeps, [](at::Tensor x, T y) { x.sub_(y, 2); }),
      write_with("mul_", keeps, [](at::Tensor x, T y) { x.mul_(y); }),
      write_with("div_", rounds, [](at::Tensor x, T y) { x.div_(y * y + 1); }, floating),
      write_with("copy_", keeps, [](at::Tensor x, T y) { x.copy_(y); }),
      write_with("lerp_", rounds, [](at::Tensor x, T y) { x.lerp_(y, 0.25); }, floating),
      write_with("addcmul_", keeps, [](at::Tensor x, T y) { x.addcmul_(y, y); }, floating),
      write("add_ 2", keeps, [](at::Tensor x) { x.add_(2); }, number),
      write("mul_ 2", keeps, [](at::Tensor x) { x.mul_(2); }, number),
      write("mul_ 0.5", rounds, [](at::Tensor x) { x.mul_(0.5); }),
      write("neg_", keeps, [](at::Tensor x) { x.neg_(); }, number),
      write("tanh_", rounds, [](at::Tensor x) { x.tanh_(); }),
      write("relu_", keeps, [](at::Tensor x) { x.relu_(); }, number, apart_from({0})),
      write("clamp_", keeps, [](at::Tensor x) { x.clamp_(-3, 3); }, number, apart_from({-3, 3})),
      write("zero_", keeps, [](at::Tensor x) { x.zero_(); }, any_tensor),
      write("fill_", keeps, [](at::Tensor x) { x.fill_(3); }, number),
      write("conj mul_", keeps, [](at::Tensor x) { conjugate(x).mul_(c10::complex<double>(1, 2)); }, pairs),
      write("conj's conj neg_", keeps, [](at::Tensor x) { conjugate(x).conj().neg_(); }, pairs),
      write("imag of conj add_", keeps, [](at::Tensor x) { at::imag(conjugate(x)).add_(3); }, pairs),
      in_place({"masked_fill_", keeps, mask_for,
                [](const Tensors& in, const Ints&) { in[0].masked_fill_(in[1], 4); return Tensors{}; }}),
  });
}

}  // namespace dtensor::fuzz
