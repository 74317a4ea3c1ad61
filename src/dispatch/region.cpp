#include "src/dispatch/region.hpp"

namespace dtensor::dispatch {

DTENSOR_FAST_THREAD_LOCAL uint64_t region = 0;
DTENSOR_FAST_THREAD_LOCAL const DeviceMesh* current_mesh = nullptr;

}  // namespace dtensor::dispatch
