// The transports' conformance on GPUs: one rank by itself, a rank per GPU under dtensor-run (nccl_gpu.sh).
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/ATen.h>
#include <torch/cuda.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::ReduceOp;
using dtensor::World;

namespace {

// Six sums of a hundred million numbers, and in the middle what the mode says ("throw:1": rank 1 throws).
void fail_in_the_middle(World& world, const std::string& mode) {
  const auto colon = mode.find(':');
  const int chosen = std::atoi(mode.c_str() + colon + 1);
  const auto what = mode.substr(0, colon);
  auto all = connect_all(world);
  for (int i = 0; i < 6; ++i) {
    if (i == 3 && world.rank() == chosen) {
      if (what == "kill") std::raise(SIGKILL);
      if (what == "throw") throw std::runtime_error("out of cheese");
      if (what == "leave") return;
      if (what == "stall") std::this_thread::sleep_for(std::chrono::minutes(10));
    }
    const auto sum = all->all_reduce(at::full({100'000'000}, world.rank(), at::kCUDA), ReduceOp::sum).get();
    const auto expected = world.size() * (world.size() - 1) / 2;
    const auto got = sum[5].item<int64_t>();
    all->all_reduce(at::ones({1}, at::kCUDA), ReduceOp::sum).get();  // throws, where the number above is of a call that was ended
    dtensor::require(got == expected, "test", "the sum is {}", got);
  }
}

void check_fully(World& world) {
  for (const auto& body : {check_reductions, check_data_movement, check_asynchrony, check_messages, check_subgroups}) body(world);
  if (world.rank() == 0) std::printf("%d ranks over %s\n", world.size(), std::string(world.transport().name()).c_str());
}

}  // namespace

TEST_CASE("nccl gpu: a rank of a job on GPUs", "[comm][nccl][gpu][rank-program]") {
  if (!torch::cuda::is_available()) DTENSOR_SKIP("no GPU");
  if (!dtensor::comm::has_nccl_transport()) DTENSOR_SKIP("this build has no nccl transport");
  const char* mode = std::getenv("DTENSOR_TEST_MODE");
  const std::string what = mode ? mode : "";
  char program[] = "dtensor-tests", transport[] = "--transport=nccl";
  char* argv[] = {program, transport, nullptr};
  CHECK(dtensor::launch(2, argv, [&](World& world) { what.empty() ? check_fully(world) : fail_in_the_middle(world, what); }) == 0);
}
