// The operators whose dispatch is measured, on plain tensors and on DTensors, by time (dispatch.cpp) and by instructions
// (instructions.cpp). Nothing of them communicates; every decision is cached after the first call.
#pragma once

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <functional>
#include <string>
#include <vector>

namespace bench {

// What the cases work on: plain tensors, and DTensors whose local shards have the same sizes. A rank without peers of a mesh of any size.
struct Tensors {
  explicit Tensors(int64_t ranks)
      : world(dtensor::comm::make_fake_transport(0, static_cast<int>(ranks))), use(world),
        mesh(dtensor::init_device_mesh(torch::kCPU, {ranks}, {"dp"})) {
    using namespace dtensor;
    A = from_local(a, mesh, {shard(0)}, {16 * ranks, 16}).tensor();
    B = from_local(b, mesh, {shard(0)}, {16 * ranks, 16}).tensor();
    W = from_local(b, mesh, {replicate()}, {16, 16}).tensor();
    for (int i = 0; i < 32; ++i) {
      list.push_back(torch::randn({16, 16}));
      List.push_back(from_local(torch::randn({16, 16}), mesh, {shard(0)}, {16 * ranks, 16}).tensor());
    }
    Spmd spmd(mesh);
    Linear = torch::nn::Linear(16, 16);
  }

  dtensor::World world;
  dtensor::World::Use use;
  dtensor::DeviceMesh mesh;
  torch::Tensor a = torch::randn({16, 16}), b = torch::randn({16, 16}), A, B, W;
  std::vector<torch::Tensor> list, List;
  torch::nn::Linear linear{torch::nn::Linear(16, 16)}, Linear{nullptr};
};

struct Case {
  std::string name;
  int calls;  // of a turn, where turns are timed
  std::function<void(Tensors&)> plain, distributed;
};

inline void forward_backward(torch::nn::Linear& module, const torch::Tensor& x) {
  module(x).sum().backward();
  module->zero_grad();
}

inline std::vector<Case> cases() {
  using T = Tensors;
  const auto without_grad = [](auto body) {
    return [body](T& t) {
      torch::NoGradGuard no_grad;
      body(t);
    };
  };
  std::vector<Case> all;
  const auto add = [&](const std::string& name, auto plain, auto distributed) {
    all.push_back({name, 500, without_grad(plain), without_grad(distributed)});
  };
  add("add", [](T& t) { torch::add(t.a, t.b); }, [](T& t) { torch::add(t.A, t.B); });
  add("mm", [](T& t) { torch::mm(t.a, t.b); }, [](T& t) { torch::mm(t.A, t.W); });
  add("relu", [](T& t) { torch::relu(t.a); }, [](T& t) { torch::relu(t.A); });
  add("sum_dim", [](T& t) { t.a.sum(1); }, [](T& t) { t.A.sum(1); });
  add("transpose", [](T& t) { t.a.t(); }, [](T& t) { t.A.t(); });
  add("add_", [](T& t) { t.a.add_(t.b); }, [](T& t) { t.A.add_(t.B); });
  add("foreach_mul_32", [](T& t) { torch::_foreach_mul_(t.list, 1.0); }, [](T& t) { torch::_foreach_mul_(t.List, 1.0); });
  all.push_back(
      {"linear_forward_backward", 50, [](T& t) { forward_backward(t.linear, t.a); }, [](T& t) { forward_backward(t.Linear, t.A); }});
  return all;
}

}  // namespace bench
