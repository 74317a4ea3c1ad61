// One line per operator: its results and gradients under every placement of its operands are those of one device.
#pragma once

#include "catch.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <functional>
#include <string>
#include <vector>

namespace dtensor::test {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

struct OpCase {
  std::string name;
  Tensors inputs;        // plain
  Function run;          // called with plain tensors for the expected values, with DTensors for the others
  double tolerance = 0;  // relative and absolute; 0: bitwise
  bool backward = true;  // floating inputs get gradients
  bool partial = true;   // floating inputs are also tried as Partial(sum)
  bool strides = true;   // results must report the strides of one device
};

// Whole numbers from -8 to 8 in a shuffled but fixed order: sums of them are exact in any order.
inline at::Tensor whole_numbers(at::IntArrayRef sizes, int64_t seed = 0) {
  const auto n = c10::multiply_integers(sizes);
  return torch::arange(n, torch::kLong)
      .mul(7 + 2 * seed)
      .add(3 * seed)
      .remainder(17)
      .sub(8)
      .to(torch::kFloat)
      .reshape(sizes);
}

// Fractions in (-2, 2), fixed, exact in 10 bits: adding a small whole number and taking it off again loses nothing.
inline at::Tensor fractions(at::IntArrayRef sizes, int64_t seed = 0) {
  const auto n = c10::multiply_integers(sizes);
  return torch::arange(n, torch::kDouble)
      .mul(0.7391 + 0.1 * seed)
      .add(seed)
      .sin()
      .mul(512)
      .round()
      .div(256)
      .to(torch::kFloat)
      .reshape(sizes);
}

// Indices in [0, below), fixed.
inline at::Tensor indices(at::IntArrayRef sizes, int64_t below, int64_t seed = 0) {
  const auto n = c10::multiply_integers(sizes);
  return torch::arange(n, torch::kLong).mul(5 + 2 * seed).add(seed).remainder(below).reshape(sizes);
}

// Runs `body` on a mesh of the given sizes; throws what the first rank to fail threw.
void on_mesh(std::vector<int64_t> sizes, const std::function<void(const DeviceMesh&)>& body,
             const std::string& transport = "threads");

// A plain tensor under `placements`. Partial parts are unequal on purpose.
at::Tensor placed(const at::Tensor& full, const DeviceMesh& mesh, PlacementsRef placements);

// Checks the case on 2, 3 and 4 ranks and on a 2x2 mesh: each input alone under every placement, and all inputs alike.
void check(const OpCase& op);

// The same on 3 ranks, over another transport.
void check_over(const std::string& transport, const OpCase& op);

// Checks that `run` on inputs placed so communicates nothing, forward only, and that its results lie as expected
// ("(S(0))", or "" for whatever). Values are compared too.
void check_free(const OpCase& op, std::vector<int64_t> mesh, const std::vector<Placements>& inputs,
                const std::vector<std::string>& results);

}  // namespace dtensor::test
