// Sorting, where no two values are equal.
#include "sketch.hpp"

namespace dtensor::fuzz {

namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

// args: dim, descending, and a number from 1 to the dim's length.
Op sorting(std::string name, std::function<Pair(T, const Ints&)> run) {
  return {std::move(name), Effect::keeps,
          one(with_dims(1, 9, number),
              [](Sketch& s, T x, Ints& a) {
                a = {s.dim(x), s.random().below(2)};
                if (x.size(a[0]) == 0) return false;
                a.push_back(s.random().between(1, x.size(a[0])));
                return true;
              }),
          [=](const Tensors& in, const Ints& a) {
            auto [values, indices] = run(in[0], a);
            return Tensors{values, indices};
          },
          distinct_along};
}

}  // namespace

void add_sorts(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      sorting("sort", [](T x, const Ints& a) { return x.sort(a[0], a[1] != 0); }),
      sorting("topk", [](T x, const Ints& a) { return x.topk(a[2], a[0], a[1] != 0, true); }),
      sorting("kthvalue", [](T x, const Ints& a) { return x.kthvalue(a[2], a[0]); }),
      sorting("argsort and cummax", [](T x, const Ints& a) { return Pair{x.argsort(a[0], a[1] != 0), std::get<0>(x.cummax(a[0]))}; }),
  });
}

}  // namespace dtensor::fuzz
