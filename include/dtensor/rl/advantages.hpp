// Advantages: of tokens with a critic and without, of answers compared in groups, and the optimal baseline of tokens.
#pragma once

#include <dtensor/rl/advantages/gae.hpp>
#include <dtensor/rl/advantages/groups.hpp>
#include <dtensor/rl/advantages/optimal_baseline.hpp>
