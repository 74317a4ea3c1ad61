// Compiles the virtual functions of packed rows, whose code is in the header: see src/parallel/context/virtual.cpp.
#include <dtensor/rl/shared_prompts.hpp>

namespace dtensor::rl {

PackedRows::~PackedRows() = default;
SharedPromptRows::~SharedPromptRows() = default;

}  // namespace dtensor::rl
