// What a user's program does first: two ranks, a distributed tensor, a sum.
#include <dtensor/dtensor.hpp>
#include <torch/types.h>

#include <sstream>

int main() {
  dtensor::launch(dtensor::LaunchOptions{2}, [](dtensor::World&) {
    auto mesh = dtensor::init_device_mesh(torch::kCPU, {2});
    auto x = dtensor::distribute_tensor(torch::arange(7), mesh, {dtensor::shard(0)});
    dtensor::require(x->sum().item<int64_t>() == 21, "consumer", "wrong sum");
    std::ostringstream printed;
    printed << x.tensor();
    dtensor::require(printed.str() == "i64[7] (S(0)) on (dim0=2)\n 0\n 1\n 2\n 3\n 4\n 5\n 6\n[ CPULongType{7} ]", "consumer", "printed {}",
                     printed.str());
  });
}
