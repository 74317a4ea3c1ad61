// A small model trained on a mesh of CUDA devices beside the same on the host: for ranks that stand-ins play, and for ranks on GPUs.
#pragma once

#include "tests/support/fully_shard_support.hpp"

#include <utility>
#include <vector>

namespace dtensor_tests {

using namespace dtensor::test::sharding;

// A stream of numbers that is the same on every device.
inline void use_counter(dtensor::World& world) { world.generator() = dtensor::Generator(1); }

inline at::Tensor to_gpu(const at::Tensor& x) { return x.to(at::kCUDA); }

// On this rank's host by itself.
inline Result trained_on_host(dtensor::World& world) {
  use_counter(world);
  return on_one_device();
}

inline Result on_host(Result result) {
  for (auto* list : {&result.gradients, &result.parameters}) {
    for (auto& tensor : *list) {
      if (tensor.defined()) tensor = tensor.cpu();
    }
  }
  return result;
}

// Throws where gradients and parameters after training on this mesh of all ranks of `world` are not those of the host.
inline void train_on_gpus(dtensor::World& world, std::vector<int64_t> sizes, std::vector<std::string> names, dtensor::Placements batch,
                          const LayOut& lay_out) {
  const auto wanted = trained_on_host(world);
  use_counter(world);
  const auto mesh = dtensor::init_device_mesh(c10::kCUDA, std::move(sizes), std::move(names));
  dtensor::Spmd spmd(mesh);
  const auto place = [&](const at::Tensor& x) { return dtensor::distribute_tensor(to_gpu(x), mesh, batch).tensor(); };
  const auto got = on_host(train(lay_out, plain_step, place));
  compare("gradient", got.gradients, wanted.gradients, 1e-10);
  compare("parameter", got.parameters, wanted.parameters, 1e-10);
}

inline void cut_by_columns_and_rows(Net& net) {
  const auto plan = dtensor::tensor_parallel({{"*.up", dtensor::ColwiseParallel()}, {"*.down", dtensor::RowwiseParallel()}});
  dtensor::parallelize_module(*net, *dtensor::Spmd::current(), plan);
}

}  // namespace dtensor_tests
