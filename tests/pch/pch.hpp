// What nearly every test includes, compiled once.

#include <torch/torch.h>

#include "../catch.hpp"

#if __has_include(<dtensor/dtensor.hpp>)
#include <dtensor/dtensor.hpp>
#endif
