// What a rank says to the others when something that all of them do has failed on it.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor::dispatch {

// Call in a catch block. Notes for the other ranks that `function` threw. Every rank of `mesh` makes this call, described by an equal
// `call`. This rank's next call tells the others. Where it failed on all of them, they go on. Otherwise that call throws on all ranks, with
// the error of this one, and so do later calls.
void note_failure(const DeviceMesh& mesh, std::string_view function, std::string_view call) noexcept;

}  // namespace dtensor::dispatch

#pragma GCC visibility pop
