// Training with each optimizer that is interrupted and goes on: on the same mesh, on another, on one device.
#pragma once

#include "tests/support/torch_files_support.hpp"

#include <dtensor/optim/adam8bit.hpp>
#include <dtensor/optim/lamb.hpp>
#include <dtensor/optim/muon.hpp>

#include <optional>

namespace dtensor::test {

using Tensors = std::vector<at::Tensor>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using Layouts = std::vector<Placements>;

inline const std::vector<std::vector<int64_t>> kSizes{{6, 10}, {9}, {3, 2, 4}, {5}, {7, 2}};
inline constexpr size_t kUnused = 4;  // gets no gradient, so that optimizers remember nothing of it
inline constexpr int kHalf = 3, kSteps = 6;

// An optimizer of two groups, the second with another rate.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)> make;
  double tolerance = 0;  // on another mesh than one device's
};

template <class Optimizer, class Options>
Kind kind(const std::string& name, const Options& options, double tolerance = 0) {
  return {name,
          [options](const Tensors& all) {
            Groups groups;
            groups.emplace_back(Tensors(all.begin(), all.begin() + 2));
            auto other = std::make_unique<Options>(options);
            other->set_lr(0.5 * other->get_lr());
            groups.emplace_back(Tensors(all.begin() + 2, all.end()), std::move(other));
            return std::make_unique<Optimizer>(std::move(groups), options);
          },
          tolerance};
}

// One group.
template <class Optimizer, class Options>
Kind lone(const std::string& name, const Options& options, double tolerance, size_t first, size_t count) {
  return {
      name,
      [=](const Tensors& all) { return std::make_unique<Optimizer>(Tensors(all.begin() + first, all.begin() + first + count), options); },
      tolerance};
}

inline std::vector<Kind> kinds() {
  namespace o = torch::optim;
  return {kind<o::SGD>("SGD", o::SGDOptions(0.02)),
          kind<o::SGD>("SGD with momentum", o::SGDOptions(0.02).momentum(0.9).nesterov(true)),
          kind<o::Adam>("Adam", o::AdamOptions(0.03).weight_decay(0.1)),
          kind<o::AdamW>("AdamW with amsgrad", o::AdamWOptions(0.03).amsgrad(true)),
          kind<o::Adagrad>("Adagrad", o::AdagradOptions(0.1).lr_decay(0.1)),
          kind<o::RMSprop>("RMSprop", o::RMSpropOptions(0.01).momentum(0.9).centered(true)),
          lone<o::LBFGS>("LBFGS", o::LBFGSOptions(0.1).max_iter(3).history_size(4), 1e-9, 0, 5),
          lone<o::LBFGS>("LBFGS with a line search", o::LBFGSOptions(0.5).max_iter(3).history_size(2).line_search_fn("strong_wolfe"), 1e-9,
                         0, 5),
          kind<optim::Lamb>("Lamb", optim::LambOptions(0.05), 1e-12),
          kind<optim::Adam8bit>("Adam8bit", optim::Adam8bitOptions(0.01).min_size(8).block_size(4)),
          lone<optim::Muon>("Muon", optim::MuonOptions(0.1), 0, 0, 1)};
}

inline at::Tensor wave(size_t i, double pace) {
  return torch::arange(c10::multiply_integers(kSizes[i]), torch::kDouble).mul(pace + 0.1 * static_cast<double>(i)).sin().reshape(kSizes[i]);
}

inline at::Tensor laid_out(const at::Tensor& plain, const std::optional<DeviceMesh>& mesh, const Layouts& layouts, size_t i) {
  if (!mesh) return plain.clone();
  const auto placements = i < layouts.size() ? layouts[i] : Placements(mesh->ndim(), replicate());
  return distribute_tensor(plain, *mesh, placements).tensor().detach().clone();
}

// Parameters and what they shall be near to, on a mesh or plain; the gradient of an element hangs on nothing else.
struct Training {
  Training(const Kind& kind, std::optional<DeviceMesh> on = {}, const Layouts& layouts = {}) : mesh(std::move(on)) {
    for (size_t i = 0; i < kSizes.size(); ++i) {
      parameters.push_back(laid_out(wave(i, 0.37), mesh, layouts, i).requires_grad_());
      targets.push_back(laid_out(wave(i, 0.91), mesh, layouts, i));
    }
    optimizer = kind.make(parameters);
  }
  at::Tensor loss(int step) const {
    at::Tensor sum;
    for (size_t i = 0; i < kUnused; ++i) {
      const auto part = (parameters[i] - targets[i]).square().mul(1.0 + 0.3 * (step % 2)).sum() + parameters[i].sin().sum();
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
  void go(int from, int to) const {
    for (int step = from; step < to; ++step) {
      optimizer->step([&] {
        optimizer->zero_grad();
        const auto value = loss(step);
        value.backward();
        return value;
      });
    }
  }
  Tensors wholes() const {
    Tensors result;
    for (const auto& p : parameters) result.push_back(full_tensor(p.detach()).clone());
    return result;
  }
  void save(const std::string& prefix) const {
    dtensor::save(parameters, prefix + ".parameters");
    dtensor::save(*optimizer, prefix + ".optimizer");
  }
  void load(const std::string& prefix) const {
    Tensors values;
    dtensor::load(values, prefix + ".parameters");
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i]);
    dtensor::load(*optimizer, prefix + ".optimizer");
  }
  // As a program of one device does it.
  void save_plainly(const std::string& prefix) const {
    torch::save(parameters, prefix + ".parameters");
    torch::save(*optimizer, prefix + ".optimizer");
  }
  void load_plainly(const std::string& prefix) const {
    Tensors values;
    torch::load(values, prefix + ".parameters");
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i]);
    torch::load(*optimizer, prefix + ".optimizer");
  }
  std::optional<DeviceMesh> mesh;
  Tensors parameters, targets;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

inline void same(const Tensors& got, const Tensors& expected, double tolerance, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool close = tolerance == 0 ? got[i].equal(expected[i]) : torch::allclose(got[i], expected[i], tolerance, tolerance);
    require(close, "test", "{}: parameter {} differs by {}", what, i, (got[i] - expected[i]).abs().max().item<double>());
  }
}

inline const Placement r = replicate(), s0 = shard(0), s1 = shard(1);
inline const Layouts kGrid{{s0, s1}, {r, s0}, {s1, strided_shard(2, 2)}, {s0, s0}, {r, s1}};
inline const Layouts kLine{{s1}, {ragged_shard(0, {1, 0, 2})}, {s0}, {r}, {flat(5)}};

inline DeviceMesh grid() { return init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"}); }

}  // namespace dtensor::test
