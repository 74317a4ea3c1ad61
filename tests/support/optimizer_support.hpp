// Optimizers on small problems: whole, on meshes, and saved in between.
#pragma once

#include "tests/support/dispatch_support.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace dtensor::test::optimizers {

namespace dt = dtensor;

using Tensors = std::vector<at::Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Tensors)>;
using Layouts = std::vector<dt::Placements>;

inline const Layouts kWhole = {};

inline at::Tensor wave(std::vector<int64_t> sizes, double pace, at::ScalarType dtype) {
  int64_t n = 1;
  for (const auto size : sizes) n *= size;
  return (torch::arange(n, torch::kDouble) * pace).sin().mul(0.7).reshape(sizes).to(dtype);
}

struct Problem {
  std::vector<std::vector<int64_t>> sizes;
  at::ScalarType dtype;
  int steps = 4;

  at::Tensor start(size_t i) const { return wave(sizes[i], 0.37 + 0.1 * static_cast<double>(i), dtype); }
  // The gradient at a step: of one element it reads nothing of the others.
  at::Tensor gradient(size_t i, int step) const {
    return wave(sizes[i], 1.3 + 0.21 * step + 0.05 * static_cast<double>(i), dtype) * (step + 1);
  }
};

inline const Problem kMatrices = {{{6, 10}, {10, 6}, {8, 8}, {5, 3, 2, 2}}, torch::kDouble};
inline const Problem kMixed = {{{6, 10}, {9}, {3, 2, 4}, {1, 5}}, torch::kDouble};
inline const Problem kLarge = {{{64, 96}, {90, 70}, {6}, {4096}}, torch::kFloat};

inline at::Tensor laid_out(const at::Tensor& plain, const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts, size_t i) {
  if (!mesh) return plain.clone();
  const auto placements = i < layouts.size() ? layouts[i] : dt::Placements(mesh->ndim(), dt::replicate());
  return dt::distribute_tensor(plain, *mesh, placements).tensor().detach().clone();
}

inline Tensors parameters(const Problem& problem, const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts) {
  Tensors given;
  for (size_t i = 0; i < problem.sizes.size(); ++i) given.push_back(laid_out(problem.start(i), mesh, layouts, i).requires_grad_());
  return given;
}

inline void steps(const Problem& problem, torch::optim::Optimizer& optimizer, const Tensors& given,
                  const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts, int first, int last) {
  for (int step = first; step < last; ++step) {
    for (size_t i = 0; i < given.size(); ++i) given[i].mutable_grad() = laid_out(problem.gradient(i, step), mesh, layouts, i);
    optimizer.step();
  }
}

inline Tensors wholes(const Tensors& given) {
  Tensors result;
  for (const auto& p : given) result.push_back(dt::full_tensor(p.detach()).clone());
  return result;
}

inline Tensors train(const Problem& problem, const Make& make, const std::optional<dt::DeviceMesh>& mesh = {},
                     const Layouts& layouts = kWhole) {
  const auto given = parameters(problem, mesh, layouts);
  const auto optimizer = make(given);
  steps(problem, *optimizer, given, mesh, layouts, 0, problem.steps);
  return wholes(given);
}

inline void same(const Tensors& got, const Tensors& expected, double tolerance, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool close = tolerance == 0 ? got[i].equal(expected[i]) : torch::allclose(got[i], expected[i], tolerance, tolerance);
    dt::require(close, "test", "{}: parameter {} differs by {}", what, i, (got[i] - expected[i]).abs().max().item<double>());
  }
}

// Four parameters under each of: rows, columns, ragged rows, replicated, two dimensions, and mixed.
inline void check_on_meshes(const Problem& problem, const Make& make, double tolerance) {
  const auto expected = train(problem, make);
  const auto r = dt::replicate();
  const auto s0 = dt::shard(0), s1 = dt::shard(1);
  const auto cut = [&](size_t i, const dt::Placement& p) {
    return p.dim < static_cast<int64_t>(problem.sizes[i].size()) ? p : dt::shard(0);
  };
  const std::vector<std::vector<int64_t>> shares = {{1}, {1, 5}, {4, 1, 0}, {3, 0, 1, 2}};
  for (const int n : {1, 2, 3, 4}) {
    for (const auto* transport : {"threads", "gloo"}) {
      if (std::string(transport) == "gloo" && n != 3) continue;
      REQUIRE_NOTHROW(on_ranks(n, [&](dt::World& world) {
        const auto ragged = dt::ragged_shard(0, shares[n - 1]);
        for (const auto& p : {r, s0, s1, ragged}) {
          Layouts layouts;
          for (size_t i = 0; i < problem.sizes.size(); ++i) layouts.push_back({cut(i, p)});
          same(train(problem, make, line(world), layouts), expected, tolerance, p.str());
        }
        same(train(problem, make, line(world), {{s0}, {r}, {ragged}, {r}}), expected, tolerance, "mixed");
      }, transport));
    }
  }
  REQUIRE_NOTHROW(on_ranks(4, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    same(train(problem, make, mesh, {{s0, cut(0, s1)}, {r, cut(1, s1)}, {s0, s0}, {r, r}}), expected, tolerance, "2x2");
    same(train(problem, make, mesh, {{r, s0}, {r, s0}, {r, s0}, {r, s0}}), expected, tolerance, "2x2, replicated over dp");
    same(train(problem, make, mesh["tp"], {{s0}, {cut(1, s1)}, {r}, {s0}}), expected, tolerance, "a submesh");
  }));
  REQUIRE_NOTHROW(on_ranks(6, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {3, 2}, {"dp", "tp"});
    same(train(problem, make, mesh, {{dt::strided_shard(0, 2), cut(0, s1)}, {s0, r}, {r, s0}, {s0, s0}}), expected, tolerance, "3x2");
  }));
}

template <class Optimizer, class Options>
Make maker(const Options& options) {
  return [options](Tensors given) { return std::make_unique<Optimizer>(std::move(given), options); };
}

// What was saved on 2 ranks goes on like nothing on one device, on 3 ranks and on 2x2.
inline void check_saved(const Problem& problem, const Make& make, double tolerance) {
  const auto expected = train(problem, make);
  const int half = problem.steps / 2;
  std::string file;
  Tensors middle;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const Layouts layouts = {{dt::shard(0)}, {dt::shard(0)}, {dt::replicate()}, {dt::shard(0)}};
    const auto given = parameters(problem, line(world), layouts);
    const auto optimizer = make(given);
    steps(problem, *optimizer, given, line(world), layouts, 0, half);
    torch::serialize::OutputArchive archive;
    optimizer->save(archive);
    const auto whole = wholes(given);
    if (world.rank() != 0) return;
    std::ostringstream out;
    archive.save_to(out);
    file = out.str();
    middle = whole;
  }));
  const auto go_on = [&](const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts) {
    Tensors given;
    for (size_t i = 0; i < middle.size(); ++i) given.push_back(laid_out(middle[i], mesh, layouts, i).requires_grad_());
    const auto optimizer = make(given);
    std::istringstream in(file);
    torch::serialize::InputArchive archive;
    archive.load_from(in);
    optimizer->load(archive);
    steps(problem, *optimizer, given, mesh, layouts, half, problem.steps);
    same(wholes(given), expected, tolerance, "training that went on");
  };
  REQUIRE_NOTHROW(go_on(std::nullopt, kWhole));
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) {
    go_on(line(world), {{dt::shard(1)}, {dt::shard(0)}, {dt::shard(0)}, {dt::replicate()}});
  }));
  REQUIRE_NOTHROW(on_ranks(4, [&](dt::World&) {
    go_on(dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"}), {{dt::shard(0), dt::shard(1)}, {dt::replicate(), dt::shard(0)}});
  }));
}

// -- References: whole tensors, formulas as they are printed ---------------------------------------------------------------------

inline Tensors reference(const Problem& problem,
                         const std::function<void(at::Tensor& x, const at::Tensor& g, Tensors& state, int t)>& step) {
  Tensors result;
  for (size_t i = 0; i < problem.sizes.size(); ++i) {
    auto x = problem.start(i);
    Tensors state = {torch::zeros_like(x), torch::zeros_like(x)};
    for (int t = 1; t <= problem.steps; ++t) step(x, problem.gradient(i, t - 1), state, t);
    result.push_back(x);
  }
  return result;
}

inline double length(const at::Tensor& t) { return std::sqrt((t * t).sum().item<double>()); }

inline at::Tensor adam_root(at::Tensor& v, const at::Tensor& g, double b2, double eps, int t) {
  v = b2 * v + (1 - b2) * g * g;
  return (v / (1 - std::pow(b2, t))).sqrt() + eps;
}

inline double ratio(double x, double u, double most) { return x == 0 || u == 0 ? 1 : std::min(x, most) / u; }

}  // namespace dtensor::test::optimizers
