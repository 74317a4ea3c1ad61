// Which elements of which tensors each rank holds: what plans of saving and of loading are made from.
#pragma once

#include "src/checkpoint/everyone.hpp"

#include <dtensor/checkpoint/index.hpp>
#include <dtensor/checkpoint/state.hpp>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace dtensor::checkpoints {

// A tensor as a rank knows it.
struct Holding {
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> sizes;
  std::vector<Box> boxes;  // of the elements that the rank has; none: it has none
};
using Holdings = std::map<std::string, Holding>;  // by name

// What the calling rank holds of `tensors`. A deferred tensor and one that is elsewhere are held by others. Throws for Partial, sparse,
// quantized and undefined tensors.
Holdings holdings_of(const std::map<std::string, at::Tensor>& tensors);

// The elements of a box in this rank's memory: a view of the tensor, or of its shard.
at::Tensor view_of(const at::Tensor& tensor, const Box& box);

// What two boxes share; nothing where that is nothing.
std::optional<Box> common(const Box& a, const Box& b);

std::string to_text(const Holdings& holdings);
Holdings holdings_from(const std::string& text);

// Ranks that hold the same boxes of a tensor.
struct Region {
  std::vector<Box> boxes;
  std::vector<int> ranks;
};

// A tensor as all ranks know it.
struct Held {
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> sizes;
  std::vector<Region> regions;
};
using AllHoldings = std::map<std::string, Held>;

// Joins what ranks hold. Throws std::runtime_error, the same on all ranks, where ranks disagree on dtype or sizes: all such are listed.
AllHoldings joined(const std::vector<Holdings>& of_ranks);

// A number that tells holdings apart.
std::array<int64_t, 2> fingerprint(const std::string& text);

}  // namespace dtensor::checkpoints
