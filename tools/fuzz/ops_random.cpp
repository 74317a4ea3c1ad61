// Random operators, of tensors that lie in any order in memory and broadcast. Each seeds the generator that it draws from.
#include "sketch.hpp"

#include <dtensor/tensor/tensor.hpp>

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace dtensor::fuzz {

namespace {

bool seeded(Sketch& sketch, T, Ints& args) {
  args = {sketch.random().below(1000)};
  return true;
}

at::Generator generator_of(const Ints& args) { return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(args[0])); }

// What takes no generator draws from the rank's own. On one device all jobs share the process's, which a rank that seeds its own seeds,
// too. A rank draws without the lock, because it may wait for the other ranks.
at::Tensor from_default(const Tensors& in, const Ints& args, const std::function<at::Tensor()>& draw) {
  static std::mutex mutex;
  std::unique_lock lock(mutex);
  at::manual_seed(static_cast<uint64_t>(args[0]));
  if (is_dtensor(in[0])) lock.unlock();
  return draw();
}

using Anew = std::function<at::Tensor(T x, at::Generator generator)>;
using Into = std::function<void(at::Tensor x, at::Generator generator)>;

// What is drawn does not jump near rounding noise: a number falls between two close ones hardly ever.
bool hardly_jumps(const Tensors&, const std::vector<bool>&, const Ints&) { return true; }

Op anew(std::string name, Anew run, Tame tame = hardly_jumps) {
  return with_args(std::move(name), rounds, floating, seeded, [=](T x, const Ints& a) { return run(x, generator_of(a)); }, std::move(tame));
}

// Of a tensor without elements native_dropout returns that tensor itself.
bool with_elements(const at::Tensor& x) { return floating(x) && x.numel() > 0; }

Op by_default(std::string name, std::function<at::Tensor(T)> run, Accepts accepts = floating) {
  return with_args(
      std::move(name), rounds, std::move(accepts), seeded, [=](T x, const Ints& a) { return from_default({x}, a, [&] { return run(x); }); },
      hardly_jumps);
}

Op into(std::string name, Effect effect, Into run, Accepts accepts = floating) {
  Op op{std::move(name), effect, one(std::move(accepts), seeded), [=](const Tensors& in, const Ints& a) {
          run(in[0], generator_of(a));
          return Tensors{};
        }};
  op.in_place = true;
  return op;
}

// With probabilities that broadcast to what is written.
Op of_probabilities(std::string name, std::function<void(at::Tensor x, T p, at::Generator generator)> run) {
  const auto draw = [](Sketch& sketch, Step& step) {
    if (!two(floating, true)(sketch, step)) return false;
    step.args = {sketch.random().below(1000)};
    return true;
  };
  Op op{std::move(name), keeps, draw, [=](const Tensors& in, const Ints& a) {
          run(in[0], in[1].detach().sigmoid(), generator_of(a));
          return Tensors{};
        }};
  op.in_place = true;
  return op;
}

}  // namespace

void add_random(std::vector<Op>& ops) {
  ops.insert(ops.end(), {
      into("uniform_", rounds, [](at::Tensor x, at::Generator g) { x.uniform_(-1, 2, g); }),
      into("normal_", rounds, [](at::Tensor x, at::Generator g) { x.normal_(0, 1, g); }),
      into("random_", keeps, [](at::Tensor x, at::Generator g) { x.random_(-5, 9, g); }, number),
      into("exponential_", rounds, [](at::Tensor x, at::Generator g) { x.exponential_(1, g); }),
      into("geometric_", keeps, [](at::Tensor x, at::Generator g) { x.geometric_(0.4, g); }),
      into("bernoulli_", keeps, [](at::Tensor x, at::Generator g) { x.bernoulli_(0.4, g); }, any_tensor),
      of_probabilities("bernoulli_ of p", [](at::Tensor x, T p, at::Generator g) { x.bernoulli_(p, g); }),
      of_probabilities("bernoulli_ of an expanded p", [](at::Tensor x, T p, at::Generator g) { x.bernoulli_(p.expand(x.sizes()), g); }),
      anew("bernoulli", [](T x, at::Generator g) { return x.sigmoid().bernoulli(g); }),
      anew("bernoulli 0.4", [](T x, at::Generator g) { return x.bernoulli(0.4, g); }),
      anew("normal of means", [](T x, at::Generator g) { return at::normal(x.tanh(), 2.0, g); }),
      anew("normal of deviations", [](T x, at::Generator g) { return at::normal(0.0, x.detach().sigmoid(), g); }),
      anew("poisson", [](T x, at::Generator g) { return at::poisson(x.detach().sigmoid() * 4, g); }),
      anew("rrelu", [](T x, at::Generator g) { return at::rrelu(x, 0.1, 0.3, true, g); }, apart_from({0})),
      by_default("native_dropout", [](T x) { return std::get<0>(at::native_dropout(x, 0.4, true)); }, with_elements),
      by_default("native_dropout's mask", [](T x) { return std::get<1>(at::native_dropout(x, 0.4, true)); }, with_elements),
      by_default("dropout", [](T x) { return at::dropout(x, 0.4, true); }),
      by_default("randn_like", [](T x) { return at::randn_like(x); }),
      by_default("rand_like of a transpose", [](T x) { return at::rand_like(x.dim() > 1 ? x.transpose(0, -1) : x); }),
      by_default("randint_like", [](T x) { return at::randint_like(x, 9); }),
  });
  for (auto it = ops.end() - 20; it != ops.end(); ++it) it->weight = 3;
}

}  // namespace dtensor::fuzz
