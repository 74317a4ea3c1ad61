// Compiles the virtual functions of a decoder's steps, whose code is in the header: see src/parallel/context/virtual.cpp.
#include <dtensor/generate/step.hpp>

namespace dtensor::generate {

Step::~Step() = default;
PagedStep::~PagedStep() = default;
MeasuringStep::~MeasuringStep() = default;

}  // namespace dtensor::generate
