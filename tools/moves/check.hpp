// Moves between two meshes against their definition: values, gradients and bytes, found by brute force over the elements that ranks hold.
#pragma once

#include <dtensor/dtensor.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <random>
#include <vector>

namespace dtensor::moves {

using Elements = std::vector<int64_t>;  // row-major global indices

// The elements that the rank at `coordinate` holds, in the order of its part; of a pending value as if it were Replicate.
Elements elements_of(const Layout& layout, c10::IntArrayRef coordinate);

// A move, as layouts say it. The meshes' ranks are any of the world.
struct Pair {
  LayoutPtr from, to;
};

// Moves a tensor there, and a gradient back, and throws at the first deviation. All ranks of the world call it alike. Checks that values
// and gradients are those of the plain tensor, bit by bit; that this rank gets what it lacks, once; that ranks which have the same send the
// same amount, to one element; that a rank which is not in either mesh communicates nothing.
void check(const Pair& pair);

// Any placement of a dim, of memory, or none, and pending ones, where they fit.
LayoutPtr random_layout(std::mt19937_64& random, const DeviceMesh& mesh, const std::vector<int64_t>& sizes, at::ScalarType dtype);

// A mesh of some of the world's ranks, in any order and of one to three dims.
DeviceMesh random_mesh(std::mt19937_64& random);

// Two layouts of a tensor of up to four dims. Equal on ranks that draw from equal generators.
Pair random_pair(std::mt19937_64& random);

}  // namespace dtensor::moves
