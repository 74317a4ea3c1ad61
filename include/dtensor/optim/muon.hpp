// Muon: an optimizer for matrices, which makes their momentum orthogonal.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/optim/optimizer.hpp>
#include <dtensor/optim/whole_by_owner.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::optim {

// The factor of the learning rate, for a matrix of r rows and c columns.
enum class MuonScale {
  original,    // sqrt(max(1, r / c))
  match_adamw  // 0.2 sqrt(max(r, c)): updates as large as AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025, eq. 4)
};

struct MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  using Coefficients = std::tuple<double, double, double>;
  MuonOptions(double lr = 1e-3);
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0.1;
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  TORCH_ARG(Coefficients, coefficients) = {3.4445, -4.7750, 2.0315};
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(int64_t, ns_steps) = 5;
  TORCH_ARG(MuonScale, scale) = MuonScale::original;
  // The dtype in which matrices are sent and made orthogonal. bfloat16 halves what is sent.
  TORCH_ARG(at::ScalarType, dtype) = at::kFloat;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
};

// Roughly the orthogonal matrix nearest to `matrix`, by Newton and Schulz's iteration. Starts with X = matrix / max(|matrix|, eps) and
// computes X = a X + (b A + c A A) X with A = X X^T, `steps` times; the coefficients are those of Jordan et al., "Muon: An optimizer for
// hidden layers in neural networks", 2024. `matrix` is [rows, columns], plain, of any floating-point type; so is the result.
at::Tensor newton_schulz(const at::Tensor& matrix, int64_t steps, const MuonOptions::Coefficients& coefficients, double eps);

// Muon (Jordan et al., 2024), for the matrices of hidden layers. Give embeddings, heads, biases and norms to another optimizer. For each
// matrix x
//
//   m = momentum m + (1-momentum) g,  u = nesterov ? momentum m + (1-momentum) g : m,
//   x = x - lr weight_decay x,  x = x - lr scale newton_schulz(u)
//
// A parameter of more than two dims (a convolution) is seen as the matrix [sizes[0], rest].
//
// One rank of a matrix's mesh makes it orthogonal as a whole; the matrices are divided among the ranks by size. Layouts may be any.
// Communicates two all_to_alls per mesh: the first gathers the shards of all matrices, the second sends the shards of the results. Each
// element is sent to the matrix's owner once. Where the gradients have the bits of one device, so has the result.
//
// State: "momentum", laid out as the parameter. Throws for options out of range, parameters of less than two dims, and sparse gradients.
class Muon : public Optimizer {
 public:
  explicit Muon(std::vector<torch::optim::OptimizerParamGroup> groups, const MuonOptions& defaults = {});
  explicit Muon(std::vector<at::Tensor> parameters, const MuonOptions& defaults = {});

 private:
  void update() override;
};

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kMuon = "Muon";

inline void check_muon(const MuonOptions& o) {
  require(o.lr() >= 0, kMuon, "got lr {}; expected a number that is not negative", o.lr());
  require(o.weight_decay() >= 0, kMuon, "got weight_decay {}; expected a number that is not negative", o.weight_decay());
  require(o.momentum() >= 0 && o.momentum() < 1, kMuon, "got momentum {}; expected a number from 0 to below 1", o.momentum());
  require(o.eps() > 0, kMuon, "got eps {}; expected a positive number", o.eps());
  require(o.ns_steps() > 0, kMuon, "got ns_steps {}; expected a positive number", o.ns_steps());
  require(at::isFloatingType(o.dtype()), kMuon, "got dtype {}; expected a floating-point one", c10::toString(o.dtype()));
}

struct MuonMatrix {
  int64_t rows, columns;
  explicit MuonMatrix(const at::Tensor& x) : rows(x.size(0)), columns(x.numel() / std::max<int64_t>(x.size(0), 1)) {}
  double cost() const {  // of products of X with its transpose
    return static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(std::min(rows, columns));
  }
  double factor(MuonScale scale) const {
    const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
    return scale == MuonScale::original ? std::sqrt(std::max(1.0, r / c)) : 0.2 * std::sqrt(std::max(r, c));
  }
};

struct MuonItem {
  at::Tensor x, u;
  const MuonOptions* options;

  bool goes_with(const MuonItem& other) const {
    return is_dtensor(x) && is_dtensor(other.x) && DTensor(x).mesh() == DTensor(other.x).mesh() &&
           options->dtype() == other.options->dtype();
  }
  at::Tensor orthogonal(const at::Tensor& whole) const {
    const auto matrix = newton_schulz(whole.reshape({x.size(0), -1}), options->ns_steps(), options->coefficients(), options->eps());
    return matrix.reshape(x.sizes());
  }
  // `part`: this rank's shard of the matrix that was made orthogonal.
  void apply(const at::Tensor& part) const {
    auto direction = part.to(x.scalar_type());
    if (is_dtensor(x)) direction = from_local(direction, DTensor(x).mesh(), DTensor(x).placements(), x.sizes());
    x.mul_(1 - options->lr() * options->weight_decay());
    x.add_(direction, -options->lr() * MuonMatrix(x).factor(options->scale()));
  }
};

inline at::Tensor advance_momentum(ParamState& state, const at::Tensor& x, const MuonOptions& options) {
  auto& m = state.tensors["momentum"];
  if (!m.defined()) m = at::zeros_like(x);
  ++state.step;
  m.lerp_(x.grad(), 1 - options.momentum());
  if (!options.nesterov()) return m;
  const auto u = x.grad().lerp(m, options.momentum());
  return is_dtensor(x) ? redistribute(u, DTensor(x).placements()) : u;
}

}  // namespace detail

inline at::Tensor newton_schulz(const at::Tensor& matrix, int64_t steps, const MuonOptions::Coefficients& coefficients, double eps) {
  const auto [a, b, c] = coefficients;
  const bool tall = matrix.size(0) > matrix.size(1);
  auto x = tall ? matrix.t() : matrix;
  x = x.div(x.norm().clamp_min(eps));
  for (int64_t i = 0; i < steps; ++i) {
    const auto square = x.mm(x.t());
    x = x.mul(a).add_(square.mul(b).addmm_(square, square, 1, c).mm(x));
  }
  return tall ? x.t() : x;
}

inline MuonOptions::MuonOptions(double lr) : lr_(lr) {}

inline void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  archive.write("scale", c10::IValue(static_cast<int64_t>(scale())));
  archive.write("dtype", c10::IValue(static_cast<int64_t>(dtype())));
}

inline void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Coefficients, coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  c10::IValue value;
  archive.read("scale", value);
  scale(static_cast<MuonScale>(value.toInt()));
  archive.read("dtype", value);
  dtype(static_cast<at::ScalarType>(value.toInt()));
}

inline Muon::Muon(std::vector<torch::optim::OptimizerParamGroup> groups, const MuonOptions& defaults)
    : Optimizer(std::move(groups), std::make_unique<MuonOptions>(defaults)) {
  for (const auto& group : param_groups()) {
    detail::check_muon(static_cast<const MuonOptions&>(group.options()));
    for (const auto& x : group.params()) {
      require(x.dim() >= 2, detail::kMuon, "is for matrices; got a parameter of {} dims; hint: give biases and norms to AdamW", x.dim());
    }
  }
}
inline Muon::Muon(std::vector<at::Tensor> parameters, const MuonOptions& defaults)
    : Muon(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

inline void Muon::update() {
  std::vector<std::vector<detail::MuonItem>> together;
  for (const auto& group : param_groups()) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const auto& x : with_gradients(group)) {
      const detail::MuonItem item{x, detail::advance_momentum(state_for(x), x, options), &options};
      const auto it = std::ranges::find_if(together, [&](const auto& items) { return items[0].goes_with(item); });
      if (it == together.end()) together.push_back({item});
      else it->push_back(item);
    }
  }
  for (const auto& items : together) {
    if (!is_dtensor(items[0].x)) {
      NoSpmd plain;
      items[0].apply(items[0].orthogonal(items[0].u.to(items[0].options->dtype())));
      continue;
    }
    std::vector<OwnedWork> work;
    for (const auto& item : items) work.push_back({item.u, detail::MuonMatrix(item.x).cost()});
    work_on_whole(work, items[0].options->dtype(), [&](size_t i, const at::Tensor& whole) { return items[i].orthogonal(whole); });
    for (size_t i = 0; i < items.size(); ++i) items[i].apply(work[i].result);
  }
}

}  // namespace dtensor::optim

#pragma GCC visibility pop
