// The conformance test of transports: one body that every transport runs at several world sizes.
#pragma once

#include <dtensor/mesh/world.hpp>

#include <string>
#include <vector>

namespace dtensor_tests {

// Runs `body` as `ranks` threads over `transport`; throws the first error. The deadline is short enough for a test.
void run_ranks(const std::string& transport, int ranks, const std::function<void(dtensor::World&)>& body, int deadline_ms = 20'000);

// Whether `call` throws a dtensor::Error whose text contains `text`; prints the text when it does not.
bool fails_with(const std::function<void()>& call, const std::string& text);

// A communicator of all ranks.
std::shared_ptr<dtensor::comm::Communicator> connect_all(dtensor::World& world, const std::string& name = "all");

// Everything a Communicator promises, on real transports. Throws at the first deviation.
void check_reductions(dtensor::World& world);
void check_data_movement(dtensor::World& world);
void check_asynchrony(dtensor::World& world);
void check_messages(dtensor::World& world);
void check_messages_out_of_order(dtensor::World& world);
void check_subgroups(dtensor::World& world);
void check_chunks(dtensor::World& world);
void check_many_in_flight(dtensor::World& world);
void check_groups_come_and_go(dtensor::World& world);

}  // namespace dtensor_tests
