// Meshes are one rank's: what to say where a tensor of another rank, or of a launch that has ended, turns up.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <string>
#include <string_view>

namespace dtensor {

// Why two meshes are not the same, and what to do about it: "hint: ...". For the end of an error's text.
std::string why_two(const DeviceMesh& first, const DeviceMesh& second);

// Throws where the calling thread is a rank, and the mesh another one's.
void check_maker(std::string_view op, const DeviceMesh& mesh);

}  // namespace dtensor
