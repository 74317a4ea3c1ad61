// What nearly every example, benchmark and tool includes, compiled once for all of them.

#include <torch/torch.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#if __has_include(<dtensor/dtensor.hpp>)
#include <dtensor/dtensor.hpp>
#endif
