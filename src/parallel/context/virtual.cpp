// Compiles the virtual functions of context parallelism, whose code is in the headers. A class is compiled where its destructor is: else
// each program that includes the headers would compile all of them, also what it does not use.
#include <dtensor/parallel/context/context_parallel.hpp>

namespace dtensor {

ContextParallel::~ContextParallel() = default;

namespace context {

AllGather::~AllGather() = default;
DoubleRing::~DoubleRing() = default;
Ring::~Ring() = default;
TokenRing::~TokenRing() = default;
Ulysses::~Ulysses() = default;

}  // namespace context

}  // namespace dtensor
