// The regions of a thread are part of the key of every call: the mesh of Spmd, and whether calls are recorded.
#pragma once

#include "src/base/fast_thread_local.hpp"

#include <cstdint>

namespace dtensor {
class DeviceMesh;
}

namespace dtensor::dispatch {

constexpr uint64_t kRecording = 1;
constexpr uint64_t kBackward = 2;  // a backward pass runs on this thread: not in `region`, but in keys

// The address of the mesh's identity (0: none), and kRecording.
extern DTENSOR_FAST_THREAD_LOCAL uint64_t region;

// The mesh of the innermost Spmd; null outside of any.
extern DTENSOR_FAST_THREAD_LOCAL const DeviceMesh* current_mesh;

}  // namespace dtensor::dispatch
