#include "sketch.hpp"

#include <algorithm>

namespace dtensor::fuzz {

const std::vector<Op>& operators() {
  static const auto all = [] {
    std::vector<Op> ops;
    for (auto* add : {add_pointwise, add_views, add_in_place, add_reductions, add_matmul, add_normalization, add_indexing,
                      add_joins, add_sorts, add_infinities, add_random}) {
      add(ops);
    }
    return ops;
  }();
  return all;
}

bool any_tensor(T) { return true; }
bool floating(T x) { return x.is_floating_point(); }
bool number(T x) { return x.scalar_type() != at::kBool; }
bool integral(T x) { return c10::isIntegralType(x.scalar_type(), false); }
bool boolean(T x) { return x.scalar_type() == at::kBool; }
Accepts with_dims(int64_t least, int64_t most, Accepts also) {
  return [=](T x) { return x.dim() >= least && x.dim() <= most && also(x); };
}

Draw one(Accepts accepts, DrawArgs args) {
  return [=](Sketch& sketch, Step& step) {
    const int value = sketch.find_or_make(accepts);
    if (value < 0) return false;
    step.in.push_back(value);
    const auto operand = sketch.at(value);
    return !args || args(sketch, operand, step.args);
  };
}

namespace {

// Sizes that broadcast to `sizes`.
Ints broadcastable(Random& random, c10::IntArrayRef sizes) {
  Ints result = sizes.vec();
  if (random.chance(60)) return result;
  if (!result.empty() && random.chance(40))
    result.erase(result.begin(), result.begin() + random.between(1, static_cast<int64_t>(result.size())));
  for (auto& size : result) size = random.chance(30) ? 1 : size;
  return result;
}

bool broadcasts(c10::IntArrayRef from, c10::IntArrayRef to) {
  if (from.size() > to.size()) return false;
  for (size_t i = 1; i <= from.size(); ++i) {
    const auto a = from[from.size() - i], b = to[to.size() - i];
    if (a != b && a != 1) return false;
  }
  return true;
}

int partner(Sketch& sketch, T x, const Accepts& accepts, bool within) {
  const auto fits = [&](T y) {
    return accepts(y) && (!within || at::can_cast(y.scalar_type(), x.scalar_type())) &&
           (broadcasts(y.sizes(), x.sizes()) || (!within && broadcasts(x.sizes(), y.sizes())));
  };
  if (sketch.random().chance(65)) {
    const int found = sketch.find(fits);
    if (found >= 0) return found;
  }
  return sketch.make_like(broadcastable(sketch.random(), x.sizes()), x);
}

Draw several(Accepts accepts, bool within, int others) {
  return [=](Sketch& sketch, Step& step) {
    const int first = sketch.find_or_make(accepts);
    if (first < 0) return false;
    step.in.push_back(first);
    const auto x = sketch.at(first);
    for (int i = 0; i < others; ++i) step.in.push_back(partner(sketch, x, accepts, within));
    if (!within && sketch.random().chance(50)) std::swap(step.in[0], step.in[1]);
    return true;
  };
}

}  // namespace

Draw two(Accepts accepts, bool within) { return several(std::move(accepts), within, 1); }
Draw three(Accepts accepts) { return several(std::move(accepts), false, 2); }

bool away_from(T x, double point) {
  if (x.numel() == 0) return true;
  return x.detach().to(at::kDouble).sub(point).abs().min().item<double>() > kMargin;
}

Tame apart_from(std::vector<double> points) {
  return [=](const Tensors& in, const std::vector<bool>& exact, const Ints&) {
    return exact[0] || std::ranges::all_of(points, [&](double point) { return away_from(in[0], point); });
  };
}

bool operands_apart(const Tensors& in, const std::vector<bool>& exact, const Ints&) {
  return (exact[0] && exact[1]) || away_from(in[0].detach().to(at::kDouble) - in[1].detach(), 0);
}

bool distinct_along(const Tensors& in, const std::vector<bool>&, const Ints& args) {
  const auto x = in[0].detach().to(at::kDouble);
  if (x.dim() == 0 || x.numel() == 0) return true;
  const auto sorted = std::get<0>(x.sort(args.empty() ? 0 : args[0]));
  return sorted.size(args.empty() ? 0 : args[0]) < 2 || away_from(sorted.diff(1, args.empty() ? 0 : args[0]), 0);
}

bool all_exact(const Tensors&, const std::vector<bool>& exact, const Ints&) {
  return std::ranges::all_of(exact, [](bool e) { return e; });
}

Op unary(std::string name, Effect effect, std::function<at::Tensor(T)> run, Tame tame, Accepts accepts) {
  return {std::move(name), effect, one(std::move(accepts)), [=](const Tensors& in, const Ints&) { return Tensors{run(in[0])}; },
          std::move(tame)};
}

Op binary(std::string name, Effect effect, std::function<at::Tensor(T, T)> run, Tame tame, Accepts accepts) {
  return {std::move(name), effect, two(std::move(accepts)),
          [=](const Tensors& in, const Ints&) { return Tensors{run(in[0], in[1])}; }, std::move(tame)};
}

Op with_args(std::string name, Effect effect, Accepts accepts, DrawArgs args, std::function<at::Tensor(T, const Ints&)> run,
             Tame tame) {
  return {std::move(name), effect, one(std::move(accepts), std::move(args)),
          [=](const Tensors& in, const Ints& a) { return Tensors{run(in[0], a)}; }, std::move(tame)};
}

}  // namespace dtensor::fuzz
