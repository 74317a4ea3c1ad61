// Reading and writing by index.
#include "sketch.hpp"

namespace dtensor::fuzz {

namespace {

using Indexed = std::function<Tensors(T x, int64_t dim, T index, T source)>;

// x, an index and a source; args: dim. The index is a vector, or of x's rank ("whole": as gather and scatter want it).
Op indexed(std::string name, bool whole, bool source, bool in_place, Indexed run) {
  return {std::move(name), keeps,
          [=](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(with_dims(1, 9, number))};
            if (step.in[0] < 0) return false;
            const auto x = sketch.at(step.in[0]);
            const auto d = sketch.dim(x), n = x.size(d);
            if (n == 0) return false;
            auto sizes = x.sizes().vec();
            const auto along = d < 0 ? d + x.dim() : d;
            sizes[along] = sketch.random().between(1, n);
            step.args = {d};
            step.in.push_back(whole ? sketch.make(sizes, at::kLong, Data::cyclic, n, along)
                                    : sketch.make({sizes[along]}, at::kLong, Data::cyclic, n));
            if (source) step.in.push_back(sketch.of_sizes(sizes, x));
            return true;
          },
          [=](const Tensors& in, const Ints& a) { return run(in[0], a[0], in[1], source ? in[2] : at::Tensor()); }, {}, in_place};
}

Op read(std::string name, bool whole, std::function<at::Tensor(T, int64_t, T)> run) {
  return indexed(std::move(name), whole, false, false, [=](T x, int64_t d, T i, T) { return Tensors{run(x, d, i)}; });
}
Op put(std::string name, bool whole, std::function<at::Tensor(T, int64_t, T, T)> run) {
  return indexed(std::move(name), whole, true, false, [=](T x, int64_t d, T i, T s) { return Tensors{run(x, d, i, s)}; });
}
Op write(std::string name, bool whole, std::function<void(T, int64_t, T, T)> run) {
  auto op = indexed(std::move(name), whole, true, true, [=](T x, int64_t d, T i, T s) { run(x, d, i, s); return Tensors{}; });
  op.weight = 5;
  op.by_index = true;
  return op;
}

using Indices = torch::List<c10::optional<at::Tensor>>;

// x[..., i, ...], with the index before dim `d`'s place.
Indices at_dim(T x, int64_t d, T index) {
  Indices indices;
  for (int64_t i = 0; i < (d < 0 ? d + x.dim() : d); ++i) indices.push_back(c10::optional<at::Tensor>());
  indices.push_back(index);
  return indices;
}

// What such an index takes: the source as it is where its indexed dim is the first, else one number.
at::Tensor fitting(T x, int64_t d, T source) { return d == 0 || d == -x.dim() ? source : source.sum(); }

// x[i, j]: two indices that broadcast against each other.
Op two_indices() {
  return {"index two", keeps,
          [](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(with_dims(2))};
            if (step.in[0] < 0) return false;
            const auto x = sketch.at(step.in[0]);
            if (x.size(0) == 0 || x.size(1) == 0) return false;
            const auto n = sketch.random().between(1, 5);
            step.in.push_back(sketch.make({n}, at::kLong, Data::index, x.size(0)));
            step.in.push_back(sketch.make(sketch.random().chance(50) ? Ints{n} : Ints{2, 1}, at::kLong, Data::index, x.size(1)));
            return true;
          },
          [](const Tensors& in, const Ints&) { return Tensors{in[0].index({in[1], in[2]})}; }};
}

// Of contiguous tensors: the gradient of masked_select takes others in memory order, on one device.
Op by_mask(std::string name, std::function<at::Tensor(T, T)> run) {
  return {std::move(name), keeps,
          [](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(with_dims(1, 9, [](T x) { return x.is_contiguous(); }))};
            if (step.in[0] < 0) return false;
            step.in.push_back(sketch.of_sizes(sketch.at(step.in[0]).sizes().vec(), at::empty({0}, at::kBool)));
            return true;
          },
          [=](const Tensors& in, const Ints&) { return Tensors{run(in[0], in[1])}; },
          [](const Tensors& in, const std::vector<bool>&, const Ints&) { return in[0].is_contiguous(); }, false, 3};
}

Op embedding() {
  return {"embedding", keeps,
          [](Sketch& sketch, Step& step) {
            step.in = {sketch.find_or_make(with_dims(2, 2, floating))};
            if (step.in[0] < 0 || sketch.at(step.in[0]).size(0) == 0) return false;
            auto sizes = sketch.shape();
            if (sizes.size() > 2) sizes.resize(2);
            step.in.push_back(sketch.make(sizes, at::kLong, Data::index, sketch.at(step.in[0]).size(0)));
            return true;
          },
          [](const Tensors& in, const Ints&) { return Tensors{at::embedding(in[0], in[1])}; }};
}

}  // namespace

void add_indexing(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      read("index_select", false, [](T x, int64_t d, T i) { return x.index_select(d, i); }),
      read("gather", true, [](T x, int64_t d, T i) { return x.gather(d, i); }),
      read("take_along_dim", true, [](T x, int64_t d, T i) { return x.take_along_dim(i, d); }),
      read("index", false, [](T x, int64_t d, T i) { return x.index(at_dim(x, d, i)); }),
      read("index_fill", false, [](T x, int64_t d, T i) { return x.index_fill(d, i, 3); }),
      read("one_hot", false, [](T x, int64_t d, T i) { return at::one_hot(i, x.size(d)); }),
      put("scatter", true, [](T x, int64_t d, T i, T s) { return x.scatter(d, i, s); }),
      put("scatter_add", true, [](T x, int64_t d, T i, T s) { return x.scatter_add(d, i, s); }),
      put("index_add", false, [](T x, int64_t d, T i, T s) { return x.index_add(d, i, s); }),
      put("index_copy", false, [](T x, int64_t d, T i, T s) { return x.index_copy(d, i, s); }),
      put("index_put", false, [](T x, int64_t d, T i, T s) { return x.index_put(at_dim(x, d, i), fitting(x, d, s)); }),
      put("index_put accumulate", false, [](T x, int64_t d, T i, T s) { return x.index_put(at_dim(x, d, i), s.sum(), true); }),
      write("scatter_", true, [](T x, int64_t d, T i, T s) { x.scatter_(d, i, s); }),
      write("scatter_add_", true, [](T x, int64_t d, T i, T s) { x.scatter_add_(d, i, s); }),
      write("index_add_", false, [](T x, int64_t d, T i, T s) { x.index_add_(d, i, s); }),
      write("index_copy_", false, [](T x, int64_t d, T i, T s) { x.index_copy_(d, i, s); }),
      write("index_fill_", false, [](T x, int64_t d, T i, T) { x.index_fill_(d, i, 2); }),
      write("index_put_", false, [](T x, int64_t d, T i, T s) { x.index_put_(at_dim(x, d, i), fitting(x, d, s)); }),
      two_indices(),
      by_mask("masked_select", [](T x, T m) { return x.masked_select(m); }),
      by_mask("index mask", [](T x, T m) { return x.index({m}); }),
      by_mask("nonzero", [](T, T m) { return m.nonzero(); }),
      embedding(),
  });
}

}  // namespace dtensor::fuzz
