// Views, and what copies only where memory demands it.
#include "sketch.hpp"

#include <range/v3/numeric/iota.hpp>

#include <algorithm>

namespace dtensor::fuzz {

namespace {

using Pieces = std::function<Tensors(T, const Ints&)>;

Op view(std::string name, Accepts accepts, DrawArgs args, std::function<at::Tensor(T, const Ints&)> run) {
  return with_args(std::move(name), Effect::keeps, std::move(accepts), std::move(args), std::move(run));
}

Op pieces(std::string name, Accepts accepts, DrawArgs args, Pieces run) {
  return {std::move(name), Effect::keeps, one(std::move(accepts), std::move(args)),
          [=](const Tensors& in, const Ints& a) { return run(in[0], a); }};
}

Ints factors(int64_t n) {
  Ints result;
  for (int64_t f = 1; f <= n; ++f) {
    if (n % f == 0) result.push_back(f);
  }
  return result;
}

// Other sizes with as many elements: neighbours joined and dims taken apart.
bool regroup(Sketch& sketch, T x, Ints& sizes) {
  auto& random = sketch.random();
  sizes = x.sizes().vec();
  if (x.numel() == 0) return false;
  const auto changes = random.between(1, 3);
  for (int64_t change = 0; change < changes; ++change) {
    if (sizes.size() > 1 && random.chance(50)) {
      const auto i = random.below(static_cast<int64_t>(sizes.size()) - 1);
      sizes[i] *= sizes[i + 1];
      sizes.erase(sizes.begin() + i + 1);
    } else if (!sizes.empty() && sizes.size() < 5) {
      const auto i = random.below(static_cast<int64_t>(sizes.size()));
      const auto factor = random.one_of(factors(sizes[i]));
      sizes[i] /= factor;
      sizes.insert(sizes.begin() + i + random.below(2), factor);
    }
  }
  if (!sizes.empty() && random.chance(20)) sizes[random.below(static_cast<int64_t>(sizes.size()))] = -1;
  return true;
}

bool dim(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x)};
  return true;
}

bool two_dims(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x), sketch.dim(x)};
  return true;
}

bool order(Sketch& sketch, T x, Ints& args) {
  args.resize(x.dim());
  ranges::iota(args, 0);
  for (auto i = x.dim() - 1; i > 0; --i) std::swap(args[i], args[sketch.random().below(i + 1)]);
  return true;
}

bool select(Sketch& sketch, T x, Ints& args) {
  const auto d = sketch.dim(x);
  if (x.size(d) == 0) return false;
  args = {d, sketch.random().between(-x.size(d), x.size(d) - 1)};
  return true;
}

// dim, start, end, step
bool slice(Sketch& sketch, T x, Ints& args) {
  auto& random = sketch.random();
  const auto d = sketch.dim(x), n = x.size(d);
  const auto start = random.below(n + 1), end = random.chance(30) ? n : random.between(start, n);
  if (start == end && !random.chance(10)) return false;
  args = {d, random.chance(20) ? start - n : start, end, random.chance(25) ? random.between(2, 3) : 1};
  return true;
}

bool narrow(Sketch& sketch, T x, Ints& args) {
  const auto d = sketch.dim(x), n = x.size(d), start = sketch.random().below(n + 1);
  args = {d, start, sketch.random().between(n == start ? 0 : 1, n - start)};
  return true;
}

bool expand(Sketch& sketch, T x, Ints& args) {
  args = x.sizes().vec();
  for (auto& size : args) {
    const bool stretched = size == 1 && sketch.random().chance(70);
    size = stretched ? sketch.random().between(2, 4) : sketch.random().chance(20) ? -1 : size;
  }
  if (x.dim() < 4 && sketch.random().chance(40)) args.insert(args.begin(), sketch.random().between(1, 3));
  return true;
}

bool new_dim(Sketch& sketch, T x, Ints& args) {
  args = {sketch.random().between(-x.dim() - 1, x.dim())};
  return true;
}

// dim, number
bool dim_and_number(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x), sketch.random().between(1, 4)};
  return x.size(args[0]) > 0 && x.size(args[0]) <= 4 * args[1];
}

// dim, then lengths that make it up
bool dim_and_lengths(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x)};
  for (auto left = x.size(args[0]); left > 0 && args.size() < 6;) {
    args.push_back(args.size() == 5 ? left : sketch.random().between(1, left));
    left -= args.back();
  }
  return args.size() > 1;
}

// offset, two dims
bool diagonal(Sketch& sketch, T x, Ints& args) {
  const auto a = sketch.random().below(x.dim()), b = sketch.random().below(x.dim());
  args = {sketch.random().between(-1, 1), a, b};
  return a != b;
}

// dim, size, step
bool unfold(Sketch& sketch, T x, Ints& args) {
  const auto d = sketch.dim(x);
  if (x.size(d) == 0) return false;
  args = {d, sketch.random().between(1, std::min<int64_t>(x.size(d), 4)), sketch.random().between(1, 3)};
  return true;
}

bool first_and_last(Sketch& sketch, T x, Ints& args) {
  const auto first = sketch.random().below(x.dim() - 1);
  args = {first, sketch.random().between(first, x.dim() - 1)};
  return true;
}

// dim, and two sizes that make it up
bool dim_and_factors(Sketch& sketch, T x, Ints& args) {
  const auto d = sketch.random().below(x.dim());
  if (x.size(d) == 0) return false;
  const auto factor = sketch.random().one_of(factors(x.size(d)));
  args = {d, factor, x.size(d) / factor};
  return true;
}

bool short_dim(Sketch& sketch, T x, Ints& args) {
  args = {sketch.dim(x)};
  return x.size(args[0]) <= 6;
}

Ints lengths(const Ints& args) { return {args.begin() + 1, args.end()}; }

}  // namespace

void add_views(std::vector<Op>& ops) {
  const auto some = with_dims(1), many = with_dims(2);
  const auto first = ops.size();
  ops.insert(ops.end(), {
      view("view", any_tensor, regroup, [](T x, const Ints& a) { return x.view(a); }),
      view("reshape", any_tensor, regroup, [](T x, const Ints& a) { return x.reshape(a); }),
      view("flatten", any_tensor, {}, [](T x, const Ints&) { return x.flatten(); }),
      view("flatten dims", many, first_and_last, [](T x, const Ints& a) { return x.flatten(a[0], a[1]); }),
      view("transpose", some, two_dims, [](T x, const Ints& a) { return x.transpose(a[0], a[1]); }),
      view("t", with_dims(0, 2), {}, [](T x, const Ints&) { return x.t(); }),
      view("permute", any_tensor, order, [](T x, const Ints& a) { return x.permute(a); }),
      view("movedim", some, two_dims, [](T x, const Ints& a) { return x.movedim(a[0], a[1]); }),
      view("select", some, select, [](T x, const Ints& a) { return x.select(a[0], a[1]); }),
      view("slice", some, slice, [](T x, const Ints& a) { return x.slice(a[0], a[1], a[2], a[3]); }),
      view("narrow", some, narrow, [](T x, const Ints& a) { return x.narrow(a[0], a[1], a[2]); }),
      view("expand", any_tensor, expand, [](T x, const Ints& a) { return x.expand(a); }),
      view("squeeze", any_tensor, {}, [](T x, const Ints&) { return x.squeeze(); }),
      view("squeeze dim", some, dim, [](T x, const Ints& a) { return x.squeeze(a[0]); }),
      view("unsqueeze", any_tensor, new_dim, [](T x, const Ints& a) { return x.unsqueeze(a[0]); }),
      view("diagonal", many, diagonal, [](T x, const Ints& a) { return x.diagonal(a[0], a[1], a[2]); }),
      view("unfold", some, unfold, [](T x, const Ints& a) { return x.unfold(a[0], a[1], a[2]); }),
      view("detach", floating, {}, [](T x, const Ints&) { return x.detach(); }),
      view("alias", any_tensor, {}, [](T x, const Ints&) { return at::alias(x); }),
      view("unflatten", some, dim_and_factors, [](T x, const Ints& a) { return x.unflatten(a[0], at::IntArrayRef{a[1], a[2]}); }),
      pieces("chunk", some, dim_and_number, [](T x, const Ints& a) { return x.chunk(a[1], a[0]); }),
      pieces("split", some, dim_and_number, [](T x, const Ints& a) { return x.split(a[1], a[0]); }),
      pieces("split_with_sizes", some, dim_and_lengths, [](T x, const Ints& a) { return x.split_with_sizes(lengths(a), a[0]); }),
      pieces("tensor_split", some, dim_and_number, [](T x, const Ints& a) { return x.tensor_split(a[1], a[0]); }),
      pieces("unbind", some, short_dim, [](T x, const Ints& a) { return x.unbind(a[0]); }),
  });
  for (auto i = first; i < ops.size(); ++i) ops[i].weight = 16;
}

}  // namespace dtensor::fuzz
