// A communicator of NCCL with one rank: where tests have one GPU, all that runs NCCL, since a group of one rank does not.
#include "src/comm/transports/nccl/channel.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

namespace {

using dtensor::comm::nccl::Channel;

// To give up after a minute.
dtensor::comm::nccl::Check patient() {
  return [end = std::chrono::steady_clock::now() + std::chrono::minutes(1)] {
    dtensor::require(std::chrono::steady_clock::now() < end, "test", "NCCL did not do it within a minute");
  };
}

// Runs a call on the channel's stream, between events of the current one, as the transport does.
void run_between(Channel& channel, const Channel::Enqueue& enqueue) {
  const auto current = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(c10::Device(c10::DeviceType::CUDA, 0));
  c10::Event ready(c10::DeviceType::CUDA), done(c10::DeviceType::CUDA);
  ready.record(current);
  ready.block(channel.stream());
  channel.run(enqueue, patient());
  done.record(channel.stream());
  done.block(current);
}

void check_collectives(Channel& channel) {
  const auto input = at::arange(100'000, at::kFloat).to(at::kCUDA), result = at::empty_like(input);
  const auto check = [&](const Channel::Enqueue& call) {
    result.zero_();
    run_between(channel, call);
    CHECK(result.cpu().equal(input.cpu()));
  };
  const void* from = input.data_ptr();
  void* to = result.data_ptr();
  const auto count = static_cast<size_t>(input.numel());
  check([&](ncclComm_t comm, cudaStream_t stream) { return ncclAllReduce(from, to, count, ncclFloat32, ncclSum, comm, stream); });
  check([&](ncclComm_t comm, cudaStream_t stream) { return ncclReduceScatter(from, to, count, ncclFloat32, ncclMax, comm, stream); });
  check([&](ncclComm_t comm, cudaStream_t stream) { return ncclBroadcast(from, to, count, ncclFloat32, 0, comm, stream); });
}

}  // namespace

TEST_CASE("nccl gpu: a communicator of one rank", "[comm][nccl][gpu]") {
  if (!dtensor::comm::can_use_nccl_transport()) DTENSOR_SKIP("no GPU");
  const auto channel = Channel::make(dtensor::comm::nccl::make_unique_id(), 1, 0, 0, patient());
  const auto child = channel->split(patient());
  const auto memory = at::empty({1 << 20}, at::kCUDA);
  void* handle = channel->add_memory(memory.data_ptr(), memory.nbytes(), patient());  // null where NCCL sees no use in it
  for (auto* of : {channel.get(), child.get()}) {
    check_collectives(*of);
    CHECK(of->error().value_or("") == "");
  }
  if (handle) channel->remove_memory(handle);
  child->abort();
  CHECK_THROWS_AS(child->run([](ncclComm_t, cudaStream_t) { return ncclSuccess; }, patient()), Channel::Broken);
}
