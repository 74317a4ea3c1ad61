// Reductions and scans.
#include "sketch.hpp"

#include <algorithm>

namespace dtensor::fuzz {

namespace {

using Reduce = std::function<at::Tensor(T, at::IntArrayRef dims, bool keep)>;

// keepdim, dims
bool some_dims(Sketch& sketch, T x, Ints& args) {
  args = {sketch.random().below(2)};
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (sketch.random().chance(40)) args.push_back(sketch.random().chance(30) ? d - x.dim() : d);
  }
  return true;
}

Op over_dims(std::string name, Effect effect, Reduce run, Accepts accepts = floating) {
  return with_args(std::move(name), effect, std::move(accepts), some_dims,
                   [=](T x, const Ints& a) { return run(x, at::IntArrayRef(a).slice(1), a[0] != 0); });
}

// dim, keepdim
bool dim_and_keep(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x), sketch.random().below(2)};
  return x.size(args[0]) > 0;
}

// Ties share the gradient of an extreme; noise would make or break them.
bool no_close_ties(const Tensors& in, const std::vector<bool>& exact, const Ints&) {
  const auto flat = in[0].detach().flatten();
  return exact[0] || distinct_along({flat}, exact, {0});
}

bool all_distinct(const Tensors& in, const std::vector<bool>& exact, const Ints&) {
  return distinct_along({in[0].flatten()}, exact, {});
}

Op extreme(std::string name, std::function<at::Tensor(T, const Ints&)> run) {
  return with_args(std::move(name), keeps, with_dims(1, 9, number), dim_and_keep, std::move(run), no_close_ties);
}

Op along(std::string name, Effect effect, std::function<at::Tensor(T, int64_t, bool)> run, Accepts accepts = number, Tame tame = {}) {
  return with_args(std::move(name), effect, with_dims(1, 9, std::move(accepts)), dim_and_keep,
                   [=](T x, const Ints& a) { return run(x, a[0], a[1] != 0); }, std::move(tame));
}

Op pair_along(std::string name, std::function<std::tuple<at::Tensor, at::Tensor>(T, int64_t, bool)> run) {
  return {std::move(name), keeps, one(with_dims(1, 9, number), dim_and_keep),
          [=](const Tensors& in, const Ints& a) {
            auto [values, indices] = run(in[0], a[0], a[1] != 0);
            return Tensors{values, indices};
          },
          distinct_along};
}

}  // namespace

void add_reductions(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      unary("sum", keeps, [](T x) { return x.sum(); }, {}, any_tensor),
      unary("mean", rounds, [](T x) { return x.mean(); }),
      unary("sum to f64", keeps, [](T x) { return x.sum(at::kDouble); }, {}, any_tensor),
      unary("amax all", keeps, [](T x) { return x.max(); }, no_close_ties, number),
      unary("amin all", keeps, [](T x) { return x.min(); }, no_close_ties, number),
      unary("norm", rounds, [](T x) { return (x * x + 1).norm(); }),
      unary("var", rounds, [](T x) { return x.var(); }),
      unary("std", rounds, [](T x) { return (x.var() + 1).sqrt(); }),
      unary("prod", keeps, [](T x) { return x.sign().prod(); }, apart_from({0}), number),
      unary("any all", keeps, [](T x) { return x.any(); }, {}, boolean),
      unary("all all", keeps, [](T x) { return x.all(); }, {}, boolean),
      unary("count_nonzero", keeps, [](T x) { return x.count_nonzero(); }, apart_from({0}), any_tensor),
      unary("argmax all", keeps, [](T x) { return x.argmax(); }, all_distinct, number),
      over_dims("sum dims", keeps, [](T x, at::IntArrayRef d, bool k) { return x.sum(d, k); }, any_tensor),
      over_dims("mean dims", rounds, [](T x, at::IntArrayRef d, bool k) { return x.mean(d, k); }),
      over_dims("var dims", rounds, [](T x, at::IntArrayRef d, bool k) { return x.var(d, false, k); }),
      over_dims("std dims", rounds, [](T x, at::IntArrayRef d, bool k) { return (x.var(d, true, k) + 1).sqrt(); }),
      over_dims("logsumexp", rounds, [](T x, at::IntArrayRef d, bool k) { return x.logsumexp(d, k); }),
      over_dims("norm dims", rounds, [](T x, at::IntArrayRef d, bool k) { return at::linalg_vector_norm(x * x + 1, 2, d, k); }),
      over_dims("norm 3 dims", rounds, [](T x, at::IntArrayRef d, bool k) { return at::linalg_vector_norm(x * x + 1, 3, d, k); }),
      extreme("amax", [](T x, const Ints& a) { return x.amax(a[0], a[1] != 0); }),
      extreme("amin", [](T x, const Ints& a) { return x.amin(a[0], a[1] != 0); }),
      pair_along("max dim", [](T x, int64_t d, bool k) { return x.max(d, k); }),
      pair_along("min dim", [](T x, int64_t d, bool k) { return x.min(d, k); }),
      pair_along("median dim", [](T x, int64_t d, bool k) { return x.median(d, k); }),
      along("argmax", keeps, [](T x, int64_t d, bool k) { return x.argmax(d, k); }, number, distinct_along),
      along("argmin", keeps, [](T x, int64_t d, bool k) { return x.argmin(d, k); }, number, distinct_along),
      along("any", keeps, [](T x, int64_t d, bool k) { return x.any(d, k); }, boolean),
      along("all", keeps, [](T x, int64_t d, bool k) { return x.all(d, k); }, boolean),
      along("prod dim", keeps, [](T x, int64_t d, bool k) { return x.sign().prod(d, k); }, number, apart_from({0})),
      along("cumsum", keeps, [](T x, int64_t d, bool) { return x.cumsum(d); }),
      along("cumprod", rounds, [](T x, int64_t d, bool) { return (x.to(at::kDouble).tanh() + 1.5).cumprod(d); }),
      along("logcumsumexp", rounds, [](T x, int64_t d, bool) { return x.logcumsumexp(d); }, floating),
  });
}

}  // namespace dtensor::fuzz
