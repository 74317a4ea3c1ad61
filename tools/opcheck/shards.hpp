// Every way in which the operands of a sample can lie on a mesh, and the parts that the ranks then hold.
#pragma once

#include "tools/opcheck/sample.hpp"

#include <dtensor/mesh/placement.hpp>

#include <vector>

namespace dtensor::opcheck {

// The placements of each operand (tensors in the order of tensors_in), per mesh dimension.
using Case = std::vector<Placements>;

// All combinations on a mesh of one dimension; at most `limit`, then drawn evenly. out= operands lie as any operand may.
std::vector<Case> cases_1d(const Sample& sample, size_t limit, bool partial);
// Drawn combinations on a mesh of so many dimensions.
std::vector<Case> cases_drawn(const Sample& sample, size_t count, bool partial, size_t mesh_dims);

// The dims of a tensor from the outermost in memory inwards.
std::vector<int64_t> memory_order(const at::Tensor& tensor);
bool is_in_order(c10::IntArrayRef order);

// The placements of the tensor with its dims in this order.
Placements permuted(PlacementsRef placements, c10::IntArrayRef order);

// Whether the part sizes are possible: a strided cut needs a divisible dim; of a flat one the question has no sense.
bool fits(const at::Tensor& tensor, PlacementsRef placements, c10::IntArrayRef mesh);

// The parts of a tensor for the ranks of a mesh (row-major). Partial parts are unequal on purpose.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, PlacementsRef placements, c10::IntArrayRef mesh);

std::string str(const Case& placements);

}  // namespace dtensor::opcheck
