// The Spmd region on any mesh.
#pragma once

#include "src/base/regions.hpp"

#include <dtensor/mesh/device_mesh.hpp>

#include <memory>

namespace dtensor::detail {

// The region of Spmd, also on a mesh that this rank is not in, for dt::on.
std::shared_ptr<Region> begin_spmd(const DeviceMesh& mesh);

}  // namespace dtensor::detail
