#include "sketch.hpp"

#include <algorithm>

namespace dtensor::fuzz {

namespace {

const std::vector<Ints> kMeshes{{2},    {2},    {3}, {4},       {2, 2}, {2, 2},    {2, 3}, {3, 2},
                                {4, 2}, {2, 1}, {1}, {2, 2, 2}, {5},    {1, 3, 2}, {8}};

bool can_be_partial(at::ScalarType dtype) { return dtype != at::kBool; }

}  // namespace

Sketch::Sketch(uint64_t seed, const DrawOptions& options) : random_(seed), options_(options) {
  program_.seed = seed;
  const auto& mesh = random_.one_of(kMeshes);
  program_.mesh = options.mesh.empty() ? mesh : options.mesh;
  program_.spmd = random_.chance(85);
  in_place_ = random_.chance(60);
  gradients_ = random_.chance(75);
  program_.infinities = random_.chance(25);
  few_ = random_.chance(20);
  flat_ = random_.chance(20);
  plain_ = std::make_unique<PlainRun>(program_.infinities);
}

int Sketch::find(const Accepts& accepts) {
  std::vector<int> fitting;
  for (const auto& [number, value] : plain_->values()) {
    if (accepts(value)) fitting.push_back(number);
  }
  if (fitting.empty()) return -1;
  const auto count = static_cast<int64_t>(fitting.size());
  const auto from = random_.chance(50) ? std::max<int64_t>(0, count - 6) : 0;
  return fitting[random_.between(from, count - 1)];
}

int Sketch::find_or_make(const Accepts& accepts) {
  const int found = random_.chance(12) ? -1 : find(accepts);
  if (found >= 0) return found;
  for (int attempt = 0; attempt < 12; ++attempt) {
    const auto dtype = random_.one_of({at::kDouble, at::kDouble, at::kDouble, at::kDouble, at::kLong, at::kFloat, at::kBool});
    const auto sizes = shape();
    if (accepts(at::empty(sizes, dtype))) return make(sizes, dtype, numbers(dtype));
  }
  return -1;
}

Data Sketch::numbers(at::ScalarType dtype) {
  if (dtype == at::kBool) return Data::mask;
  if (dtype == at::kLong) return random_.one_of({Data::whole, Data::distinct});
  if (program_.infinities && random_.chance(40)) return Data::infinite;
  return random_.one_of({Data::fraction, Data::fraction, Data::whole, Data::distinct});
}

int Sketch::make(Ints sizes, at::ScalarType dtype, Data data, int64_t bound, int64_t dim) {
  Step step;
  auto& leaf = step.leaf;
  leaf.placements = placements(sizes, dtype);
  leaf.sizes = std::move(sizes);
  leaf.dtype = dtype;
  leaf.data = data;
  leaf.bound = bound;
  leaf.dim = dim;
  leaf.seed = random_.below(1000);
  leaf.requires_grad = gradients_ && at::isFloatingType(dtype) && random_.chance(60);
  leaf.reversed = random_.chance(15);
  step.out = {program_.values++};
  const int number = step.out[0];
  add(std::move(step));
  return number;
}

int Sketch::of_sizes(const Ints& sizes, T like) {
  const auto dtype = like.scalar_type();
  const int found = random_.chance(50) ? find([&](T x) { return x.sizes() == sizes && x.scalar_type() == dtype; }) : -1;
  return found >= 0 ? found : make_like(sizes, like);
}

Ints Sketch::shape() {
  static const std::vector<int64_t> lengths{1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 6, 7, 8, 8, 9, 12, 0};
  Ints sizes(random_.weighted(std::vector<int64_t>{4, 20, 40, 26, 10}));
  for (auto& size : sizes) {
    do size = few_ ? random_.between(1, 3) : random_.one_of(lengths);
    while (size == 0 && !random_.chance(25));
  }
  while (c10::multiply_integers(sizes) > 400) sizes.pop_back();
  return sizes;
}

int64_t Sketch::dim(T x) { return random_.below(x.dim()) - (random_.chance(30) ? x.dim() : 0); }

Placement Sketch::placement(c10::IntArrayRef sizes, at::ScalarType dtype) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  if (random_.chance(18) && can_be_partial(dtype)) {
    return partial(
        random_.one_of({ReduceOp::sum, ReduceOp::sum, ReduceOp::sum, ReduceOp::sum, ReduceOp::avg, ReduceOp::max, ReduceOp::min}));
  }
  if (ndim == 0 || random_.chance(25)) return replicate();
  const auto d = random_.below(ndim);
  if (!random_.chance(15)) return shard(d);
  return strided_shard(d, random_.between(2, 3), random_.chance(30) ? 2 : 1);
}

const Shares* Sketch::shares(int64_t parts) {
  Ints drawn(parts);
  for (auto& share : drawn) share = random_.below(4);
  drawn[random_.below(parts)] += 1;
  return Shares::of(drawn);
}

Placements Sketch::placements(c10::IntArrayRef sizes, at::ScalarType dtype) {
  Placements result;
  Ints left = sizes.vec();  // of each dim on every rank; 0 where ranks differ, and then it is split no further
  for (const auto parts : program_.mesh) {
    auto drawn = placement(sizes, dtype);
    if (drawn.is_shard()) {
      auto& length = left[drawn.dim];
      const auto blocks = drawn.split * drawn.unit;
      if (blocks > 1 && (length == 0 || length % blocks != 0)) drawn = shard(drawn.dim);
      const bool ragged = random_.chance(12);
      if (ragged) drawn.shares = shares(parts);
      length = !ragged && length % (parts * drawn.split * drawn.unit) == 0 ? length / parts : 0;
    }
    result.push_back(drawn);
  }
  if (!sizes.empty() && random_.chance(flat_ ? 45 : 8)) {
    const auto m = random_.below(static_cast<int64_t>(result.size()));
    const auto offset = random_.below(5), parts = program_.mesh[m];
    result[m] = flat((c10::multiply_integers(sizes) + offset) / parts + 1 + random_.below(3), offset);
  }
  return result;
}

bool Sketch::add(Step step) {
  if (!plain_->run(step)) return false;
  if (step.kind == Step::Kind::call && !step.op->in_place) {
    step.out = plain_->number_results(program_.values);
    program_.values += static_cast<int>(step.out.size());
  }
  program_.steps.push_back(std::move(step));
  return true;
}

bool Sketch::add_call() {
  const auto& all = operators();
  static const auto weights = [&] {
    std::vector<int64_t> result;
    for (const auto& op : all) result.push_back(op.weight);
    return result;
  }();
  Step step;
  step.kind = Step::Kind::call;
  step.op = options_.only && random_.chance(20) ? options_.only : &all[random_.weighted(weights)];
  if (step.op->in_place && !in_place_) return false;
  step.no_grad = random_.chance(step.op->in_place ? 25 : 2);
  const auto before = program_.steps.size();
  const bool writes = step.op->in_place;
  if (step.op->draw(*this, step) && add(std::move(step))) return true;
  while (program_.steps.size() > before) {
    plain_->forget(program_.steps.back().out[0]);
    program_.steps.pop_back();
  }
  if (!writes) return false;
  plain_ = std::make_unique<PlainRun>(program_.infinities);  // what was written must not stay
  for (const auto& earlier : program_.steps) plain_->run(earlier);
  return false;
}

void Sketch::add_redistribute() {
  Step step;
  step.kind = Step::Kind::redistribute;
  // The copy has the strides of its source.
  const int from = find([](T x) { return x.is_non_overlapping_and_dense(); });
  if (from < 0) return;
  step.in = {from};
  step.placements = placements(at(from).sizes(), at(from).scalar_type());
  step.out = {program_.values++};
  add(std::move(step));
}

void Sketch::add_roots() {
  for (int i = 0; gradients_ && i < 3; ++i) {
    const int value = find([](T x) { return x.requires_grad() && !x.is_leaf(); });
    const auto used = [&](const Root& root) { return root.value == value; };
    if (value < 0 || std::ranges::any_of(program_.roots, used)) continue;
    Root root{value, {}};
    root.cotangent.sizes = at(value).sizes().vec();
    root.cotangent.dtype = at(value).scalar_type();
    root.cotangent.seed = random_.below(1000);
    root.cotangent.placements = placements(root.cotangent.sizes, root.cotangent.dtype);
    program_.roots.push_back(std::move(root));
  }
}

Program draw(uint64_t seed, const DrawOptions& options) {
  Sketch sketch(seed, options);
  const auto operators = sketch.random_.between(std::min(5, options.most_operators), options.most_operators);
  const auto leaves = sketch.random_.between(1, 3);
  for (int64_t i = 0; i < leaves; ++i) sketch.find_or_make(any_tensor);
  for (int attempt = 0; attempt < 10 * operators && sketch.program_.operators() < operators; ++attempt) {
    sketch.random_.chance(7) ? sketch.add_redistribute() : static_cast<void>(sketch.add_call());
  }
  sketch.add_roots();
  return std::move(sketch.program_);
}

}  // namespace dtensor::fuzz
