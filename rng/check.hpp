// What can go wrong with the generators of ranks, looked for.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace dtensor::rng {

// Throws when another rank of this process draws from the generator too: it can only follow one of them.
void check_owner(const at::Generator& generator, World& world);

// Forgets what a rank that ends has drawn from.
void forget_owner(World& world);

// Compares the generator between ranks, as generator_check() says, before a distributed tensor is drawn. Throws, inside of a
// RankLocalRandom, when the tensor is replicated.
void check_draw(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const at::Generator& generator);

// The same where the operator does not take a generator, or not as an argument.
void check_draw(std::string_view op, const DeviceMesh& mesh, PlacementsRef placements, const at::Generator& generator);

}  // namespace dtensor::rng
