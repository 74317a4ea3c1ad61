// Forward declarations, for headers and programs that only pass these types along.
#pragma once

namespace at { class Tensor; }

namespace dtensor {
class World;
class DeviceMesh;
class Layout;
class DTensor;
class Spmd;
struct Placement;
namespace comm {
class Communicator;
class Transport;
class Work;
}  // namespace comm
}  // namespace dtensor
