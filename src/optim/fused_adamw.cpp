#include <dtensor/optim/fused_adamw.hpp>

#include <dtensor/optim/param_states.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/spread.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <optional>

namespace dtensor::optim {

namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;

// A parameter's shard on this rank, with what a step needs of it.
struct Shard {
  at::Tensor parameter, gradient, average, square;
  AdamWParamState& state;
  const AdamWOptions& options;
};

AdamWParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = optimizer.state()[detail::key_of<detail::States::key_type>(parameter)];
  if (!state) {
    auto made = std::make_unique<AdamWParamState>();
    made->exp_avg(at::zeros_like(parameter));
    made->exp_avg_sq(at::zeros_like(parameter));
    state = std::move(made);
  }
  return static_cast<AdamWParamState&>(*state);
}

bool suits(const Shard& shard) {
  const auto dtype = shard.parameter.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble) return false;
  for (const auto* x : {&shard.parameter, &shard.gradient, &shard.average, &shard.square}) {
    if (!x->is_cpu() || x->scalar_type() != dtype || !x->is_contiguous()) return false;
  }
  return true;
}

// Of all parameters that have a gradient; nothing where one does not suit.
std::optional<std::vector<Shard>> shards_of(torch::optim::Optimizer& optimizer) {
  std::vector<Shard> shards;
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const AdamWOptions&>(group.options());
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (options.amsgrad() || gradient.is_sparse() || find_layout(parameter) != find_layout(gradient)) return {};
      auto& state = state_of(optimizer, parameter);
      const auto own = [](const at::Tensor& x) { return dtensor::detail::plain_local(x); };
      shards.push_back({own(parameter), own(gradient), own(state.exp_avg()), own(state.exp_avg_sq()), state, options});
      if (!suits(shards.back())) return {};
    }
  }
  return shards;
}

template <class T>
struct Factors {
  T decay, first, first_rest, second, second_rest, root, eps, rate;

  Factors(const AdamWOptions& options, int64_t step) {
    const auto [b1, b2] = options.betas();
    decay = static_cast<T>(1 - options.lr() * options.weight_decay());
    first = static_cast<T>(b1), first_rest = static_cast<T>(1 - b1);
    second = static_cast<T>(b2), second_rest = static_cast<T>(1 - b2);
    root = static_cast<T>(std::sqrt(1 - std::pow(b2, static_cast<double>(step))));
    eps = static_cast<T>(options.eps());
    rate = static_cast<T>(options.lr() / (1 - std::pow(b1, static_cast<double>(step))));
  }
};

// Each element by itself, in operations that are rounded alike wherever it lies in a register.
#define DTENSOR_LOOPS __attribute__((optimize("O3")))

template <class T>
DTENSOR_LOOPS void add_to_averages(T* __restrict m, T* __restrict v, const T* __restrict g, int64_t size, const Factors<T>& factors) {
  const auto of = factors;
  for (int64_t i = 0; i < size; ++i) {
    m[i] = m[i] * of.first + g[i] * of.first_rest;
    v[i] = v[i] * of.second + g[i] * g[i] * of.second_rest;
  }
}

template <class T>
DTENSOR_LOOPS void move(T* __restrict x, const T* __restrict m, const T* __restrict root, int64_t size, const Factors<T>& factors) {
  const auto of = factors;
  for (int64_t i = 0; i < size; ++i) x[i] = x[i] * of.decay - of.rate * (m[i] / (root[i] / of.root + of.eps));
}

template <class T>
void update(const Shard& shard) {
  const NoSpmd plain;
  const Factors<T> factors(shard.options, shard.state.step());
  const auto size = shard.parameter.numel();
  auto* const average = shard.average.data_ptr<T>();
  add_to_averages(average, shard.square.data_ptr<T>(), shard.gradient.data_ptr<T>(), size, factors);
  const auto root = shard.square.sqrt();  // GCC takes no roots side by side where they may set errno
  move(shard.parameter.data_ptr<T>(), average, root.data_ptr<T>(), size, factors);
}

}  // namespace

at::Tensor FusedAdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  const auto shards = shards_of(*this);
  if (!shards) {
    AdamW::step();
    return loss;
  }
  for (const auto& shard : *shards) {
    shard.state.step(shard.state.step() + 1);
    shard.parameter.scalar_type() == at::kDouble ? update<double>(shard) : update<float>(shard);
    shard.parameter.unsafeGetTensorImpl()->bump_version();
  }
  return loss;
}

}  // namespace dtensor::optim
