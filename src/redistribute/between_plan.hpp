// Who gives whom what when a tensor moves between two meshes.
#pragma once

#include <dtensor/redistribute/between_meshes.hpp>

#include <optional>

namespace dtensor::redistribute {

// What the rank at `coordinate` holds of a pending sum or product instead of values: zeros or ones; nothing where it has the values.
std::optional<int> identity_of(const Layout& layout, c10::IntArrayRef coordinate);

// The plan of world rank `rank`.
MeshMovePlan find_plan_between(const Layout& from, const Layout& to, int rank);

}  // namespace dtensor::redistribute
