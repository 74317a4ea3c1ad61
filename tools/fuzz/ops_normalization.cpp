// Softmax, norms and losses.
#include "sketch.hpp"

namespace dtensor::fuzz {

namespace {

bool some_dim(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x)};
  return x.size(args[0]) > 0;
}

Op along(std::string name, std::function<at::Tensor(T, int64_t)> run) {
  return with_args(std::move(name), rounds, with_dims(1, 9, floating), some_dim, [=](T x, const Ints& a) { return run(x, a[0]); });
}

// Rounding decides the sign of an element that is nearly the mean, and so that of its product with an infinite weight.
bool tame_scale(T normalized, T weight) { return weight.isfinite().all().item<bool>() || away_from(normalized, 0); }

// Scale and shift of the last args[0] dims.
Op layer_norm() {
  return {"layer_norm", rounds,
          [](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(with_dims(1, 9, [](T x) { return floating(x); }))};
            if (step.in[0] < 0) return false;
            const auto x = sketch.at(step.in[0]);
            step.args = {sketch.random().between(1, std::min<int64_t>(2, x.dim()))};
            const Ints sizes(x.sizes().end() - step.args[0], x.sizes().end());
            for (int i = 0; i < 2; ++i) step.in.push_back(sketch.of_sizes(sizes, x));
            return c10::multiply_integers(sizes) > 1;  // else there is nothing but noise to normalize
          },
          [](const Tensors& in, const Ints&) { return Tensors{at::layer_norm(in[0], in[1].sizes(), in[1], in[2], 0.1)}; },
          [](const Tensors& in, const std::vector<bool>&, const Ints&) {
            return tame_scale(at::layer_norm(in[0], in[1].sizes(), {}, {}, 0.1), in[1]);
          }};
}

Op group_norm() {
  return {"group_norm", rounds,
          [](Sketch& sketch, Step& step) {
            const auto has_groups = [](T x) { return floating(x) && x.size(1) % 2 == 0 && x.numel() > 2 * x.size(0); };
            step.in = {sketch.find_or_make(with_dims(2, 4, has_groups))};
            if (step.in[0] < 0) return false;
            const auto x = sketch.at(step.in[0]);
            for (int i = 0; i < 2; ++i) step.in.push_back(sketch.of_sizes({x.size(1)}, x));
            return true;
          },
          [](const Tensors& in, const Ints&) { return Tensors{at::group_norm(in[0], 2, in[1], in[2], 0.1)}; },
          [](const Tensors& in, const std::vector<bool>&, const Ints&) {
            return tame_scale(at::group_norm(in[0], 2, {}, {}, 0.1), in[1]);
          }};
}

// Logits [batch, classes, ...] and the classes that are right; args: reduction, label smoothing in tenths.
Op classes(std::string name, std::function<at::Tensor(T, T, const Ints&)> run) {
  return {std::move(name), rounds,
          [](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(with_dims(2, 3, [](T x) { return floating(x) && x.size(1) > 0; }))};
            if (step.in[0] < 0) return false;
            auto sizes = sketch.at(step.in[0]).sizes().vec();
            const auto count = sizes[1];
            sizes.erase(sizes.begin() + 1);
            step.in.push_back(sketch.make(sizes, at::kLong, Data::index, count));
            step.args = {sketch.random().below(3), sketch.random().chance(30) ? 1 : 0};
            return true;
          },
          [=](const Tensors& in, const Ints& a) { return Tensors{run(in[0], in[1], a)}; }};
}

Op loss(std::string name, std::function<at::Tensor(T, T, int64_t)> run, Tame tame = {}) {
  return {std::move(name), rounds,
          [](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(floating)};
            if (step.in[0] < 0) return false;
            const auto x = sketch.at(step.in[0]);
            step.in.push_back(sketch.of_sizes(x.sizes().vec(), x));
            step.args = {sketch.random().below(3)};
            return true;
          },
          [=](const Tensors& in, const Ints& a) { return Tensors{run(in[0], in[1], a[0])}; }, std::move(tame)};
}

}  // namespace

void add_normalization(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      along("softmax", [](T x, int64_t d) { return x.softmax(d); }),
      along("log_softmax", [](T x, int64_t d) { return x.log_softmax(d); }),
      along("softmax to f64", [](T x, int64_t d) { return x.softmax(d, at::kDouble); }),
      along("normalize", [](T x, int64_t d) { return x / ((x * x).sum(d, true) + 1).sqrt(); }),
      layer_norm(),
      group_norm(),
      classes("cross_entropy", [](T x, T y, const Ints& a) { return at::cross_entropy_loss(x, y, {}, a[0], -100, a[1] * 0.1); }),
      classes("nll_loss", [](T x, T y, const Ints& a) { return at::nll_loss_nd(x.log_softmax(1), y, {}, a[0], 0); }),
      loss("mse_loss", [](T x, T y, int64_t r) { return at::mse_loss(x, y, r); }),
      loss("l1_loss", [](T x, T y, int64_t r) { return at::l1_loss(x, y, r); }, operands_apart),
      loss("smooth_l1_loss", [](T x, T y, int64_t r) { return at::smooth_l1_loss(x, y, r); }),
      loss("huber_loss", [](T x, T y, int64_t r) { return at::huber_loss(x, y, r); }),
      loss("bce_with_logits", [](T x, T y, int64_t r) { return at::binary_cross_entropy_with_logits(x, y.sigmoid(), {}, {}, r); }),
      loss("kl_div", [](T x, T y, int64_t r) { return at::kl_div(at::log_sigmoid(x), y.sigmoid(), r); }),
      loss("soft_margin_loss", [](T x, T y, int64_t r) { return at::soft_margin_loss(x, y.tanh(), r); }),
      unary("glu", rounds, [](T x) { return at::glu(x, -1); }, {},
            with_dims(1, 9, [](T x) { return floating(x) && x.size(-1) % 2 == 0; })),
  });
}

}  // namespace dtensor::fuzz
