// Forward declarations, for headers and programs that only pass these types along.
#pragma once

#pragma GCC visibility push(default)

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

#pragma GCC visibility pop
