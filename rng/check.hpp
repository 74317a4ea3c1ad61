// Checks of the ranks' random generators: that each rank has its own, and that ranks draw alike.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace dtensor::rng {

// Throws when another rank of this process draws from the generator too, because a generator can follow only one rank.
void check_owner(const at::Generator& generator, World& world);

// Forgets the generators that a rank has drawn from; called when the rank ends.
void forget_owner(World& world);

// Compares the generator between ranks, as often as generator_check() says, before a distributed tensor is drawn. Inside a RankLocalRandom
// it throws when the tensor is replicated.
void check_draw(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const at::Generator& generator);

// The same for an operator that takes no generator, or not as an argument.
void check_draw(std::string_view op, const DeviceMesh& mesh, PlacementsRef placements, const at::Generator& generator);

}  // namespace dtensor::rng
