// Errors for a tensor on another mesh. A mesh belongs to one rank, so the tensor may be of another rank, or of a launch that has ended.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <string>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor {

// The end of an error's text: why two meshes are not the same, and what to do about it ("hint: ...").
std::string why_two(const DeviceMesh& first, const DeviceMesh& second);

// Throws if the calling thread is a rank and the mesh belongs to another one.
void check_maker(std::string_view op, const DeviceMesh& mesh);

}  // namespace dtensor

#pragma GCC visibility pop
