// What a user's program does first: two ranks, a distributed tensor, a sum.
#include <dtensor/dtensor.hpp>
#include <torch/types.h>

int main() {
  dtensor::launch(dtensor::LaunchOptions{2}, [](dtensor::World&) {
    auto mesh = dtensor::init_device_mesh(torch::kCPU, {2});
    auto x = dtensor::distribute_tensor(torch::arange(7), mesh, {dtensor::shard(0)});
    dtensor::require(x->sum().item<int64_t>() == 21, "consumer", "wrong sum");
  });
}
