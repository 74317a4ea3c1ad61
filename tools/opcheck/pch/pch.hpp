// What every file of opcheck includes, compiled once.
#pragma once

#include <torch/torch.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
