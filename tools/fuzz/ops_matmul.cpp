// Products of matrices.
#include "sketch.hpp"

#include <algorithm>

namespace dtensor::fuzz {

namespace {

// Beside an infinity, what rounding leaves of a zero is the whole of the product.
bool finite_or_exact(const Tensors& in, const std::vector<bool>& exact, const Ints& args) {
  return all_exact(in, exact, args) || std::ranges::all_of(in, [](const auto& x) { return x.isfinite().all().template item<bool>(); });
}

// An operand with `least` to `most` dims, and others whose sizes follow from its own.
using Sizes = std::vector<Ints>;
using Others = std::function<Sizes(Random&, const Ints&)>;

Op product(std::string name, int64_t least, int64_t most, Others others, std::function<at::Tensor(const Tensors&)> run) {
  return {std::move(name), Effect::keeps,
          [=](Sketch& sketch, Step& step) {
            const int first = sketch.find_or_make(with_dims(least, most, number));
            if (first < 0) return false;
            step.in = {first};
            const auto x = sketch.at(first);
            for (const auto& sizes : others(sketch.random(), x.sizes().vec())) step.in.push_back(sketch.of_sizes(sizes, x));
            return true;
          },
          [=](const Tensors& in, const Ints&) { return Tensors{run(in)}; }, finite_or_exact, false, 14};
}

int64_t width(Random& random) { return random.one_of({1, 2, 3, 4, 4, 5, 6, 8}); }

}  // namespace

void add_matmul(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      product("mm", 2, 2, [](Random& r, const Ints& s) { return Sizes{{s[1], width(r)}}; }, [](auto& x) { return x[0].mm(x[1]); }),
      product("mm transposed", 2, 2, [](Random& r, const Ints& s) { return Sizes{{width(r), s[1]}}; },
              [](auto& x) { return x[0].mm(x[1].t()); }),
      product("mm from left", 2, 2, [](Random& r, const Ints& s) { return Sizes{{width(r), s[0]}}; },
              [](auto& x) { return x[1].mm(x[0]); }),
      product("bmm", 3, 3, [](Random& r, const Ints& s) { return Sizes{{s[0], s[2], width(r)}}; },
              [](auto& x) { return x[0].bmm(x[1]); }),
      product("baddbmm", 3, 3, [](Random& r, const Ints& s) {
                const auto w = width(r);
                return Sizes{{s[0], s[2], w}, {r.chance(50) ? s[0] : 1, s[1], w}};
              },
              [](auto& x) { return at::baddbmm(x[2], x[0], x[1]); }),
      product("matmul", 1, 4, [](Random& r, const Ints& s) { return Sizes{r.chance(30) ? Ints{s.back()} : Ints{s.back(), width(r)}}; },
              [](auto& x) { return at::matmul(x[0], x[1]); }),
      product("matmul batched", 3, 4, [](Random& r, const Ints& s) {
                auto b = s;
                b[b.size() - 2] = s.back();
                b.back() = width(r);
                if (r.chance(30)) b[0] = 1;
                return Sizes{b};
              },
              [](auto& x) { return at::matmul(x[0], x[1]); }),
      product("linear", 1, 4, [](Random& r, const Ints& s) { const auto w = width(r); return Sizes{{w, s.back()}, {w}}; },
              [](auto& x) { return at::linear(x[0], x[1], x[2]); }),
      product("addmm", 2, 2, [](Random& r, const Ints& s) {
                const auto w = width(r);
                return Sizes{{s[1], w}, r.chance(50) ? Ints{w} : Ints{s[0], w}};
              },
              [](auto& x) { return at::addmm(x[2], x[0], x[1], 2, 3); }),
      product("addmv", 2, 2, [](Random&, const Ints& s) { return Sizes{{s[1]}, {s[0]}}; },
              [](auto& x) { return at::addmv(x[2], x[0], x[1]); }),
      product("mv", 2, 2, [](Random&, const Ints& s) { return Sizes{{s[1]}}; }, [](auto& x) { return x[0].mv(x[1]); }),
      product("dot", 1, 1, [](Random&, const Ints& s) { return Sizes{s}; }, [](auto& x) { return x[0].dot(x[1]); }),
      product("outer", 1, 1, [](Random& r, const Ints&) { return Sizes{{width(r)}}; }, [](auto& x) { return x[0].outer(x[1]); }),
      product("einsum bij,bkj->bik", 3, 3, [](Random& r, const Ints& s) { return Sizes{{s[0], width(r), s[2]}}; },
              [](auto& x) { return at::einsum("bij,bkj->bik", {x[0], x[1]}); }),
      product("einsum ...i,oi->o...", 1, 3, [](Random& r, const Ints& s) { return Sizes{{width(r), s.back()}}; },
              [](auto& x) { return at::einsum("...i,oi->o...", {x[0], x[1]}); }),
      product("einsum ij,jk,k->i", 2, 2, [](Random& r, const Ints& s) { const auto w = width(r); return Sizes{{s[1], w}, {w}}; },
              [](auto& x) { return at::einsum("ij,jk,k->i", {x[0], x[1], x[2]}); }),
      product("einsum iij->j", 3, 3, [](Random&, const Ints& s) { return Sizes{{s[0], s[0], s[2]}}; },
              [](auto& x) { return at::einsum("iij->j", {x[1]}) + x[0].sum(); }),
      product("tensordot", 2, 3, [](Random& r, const Ints& s) { return Sizes{{s.back(), s[0], width(r)}}; },
              [](auto& x) { return at::tensordot(x[0], x[1], {0, x[0].dim() - 1}, {1, 0}); }),
  });
}

}  // namespace dtensor::fuzz
