// Compiles the virtual functions of packed rows, whose code is in the header: see src/parallel/context/virtual.cpp.
#include <dtensor/rl/pack.hpp>

namespace dtensor::rl {

PackedRows::~PackedRows() = default;

}  // namespace dtensor::rl
