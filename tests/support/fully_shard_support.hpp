// What the tests of fully_shard share: a small model, its training, and its comparison with one device.
#pragma once

#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <torch/nn/modules/container/modulelist.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace dtensor::test::sharding {

namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t d)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({d})))),
        up(register_module("up", nn::Linear(d, 2 * d + 1))),
        down(register_module("down", nn::Linear(2 * d + 1, d))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

// Embedding, three blocks, a head; `tied` to the embedding.
struct NetImpl : nn::Module {
  explicit NetImpl(bool tied = false)
      : tokens(register_module("tokens", nn::Embedding(11, kWidth))), blocks(register_module("blocks", nn::ModuleList())) {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block(kWidth));
    unused = register_parameter("unused", torch::ones({5}));
    head = register_parameter("head", tied ? tokens->weight : torch::randn({11, kWidth}) * 0.3);
  }
  at::Tensor forward(const at::Tensor& ids, std::vector<int> order = {0, 1, 2}) {
    auto x = tokens(ids);
    for (const int i : order) x = blocks[i]->as<Block>()->forward(x);
    return at::linear(x, head);
  }
  static constexpr int64_t kWidth = 12;
  nn::Embedding tokens;
  nn::ModuleList blocks;
  at::Tensor unused, head;
};
TORCH_MODULE(Net);

inline at::Tensor ids(int step) { return torch::arange(24).mul(7 + step).remainder(11).view({12, 2}); }

inline at::Tensor loss_of(Net& net, const at::Tensor& input, const std::vector<int>& order = {0, 1, 2}) {
  return torch::nn::functional::cross_entropy(net->forward(input, order).flatten(0, 1), input.flatten());
}

using LayOut = std::function<void(Net&)>;
using Place = std::function<at::Tensor(const at::Tensor&)>;
using TrainStep = std::function<void(Net&, int, const Place&)>;

struct Result {
  std::vector<at::Tensor> gradients, parameters;  // after the last step; whole
};

inline void plain_step(Net& net, int step, const Place& place) { loss_of(net, place(ids(step))).backward(); }

inline Result train(const LayOut& lay_out, const TrainStep& step, const Place& place, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(1);
  Net net;
  net->to(dtype);
  lay_out(net);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
  Result result;
  for (int i = 0; i < 3; ++i) {
    for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
    step(net, i, place);
    result.gradients.clear();
    for (const auto& p : net->parameters()) result.gradients.push_back(p.grad().defined() ? full_tensor(p.grad()).clone() : at::Tensor());
    optimizer.step();
  }
  for (const auto& p : net->parameters()) result.parameters.push_back(full_tensor(p.detach()).clone());
  return result;
}

inline Result on_one_device(const TrainStep& step = plain_step, at::ScalarType dtype = at::kDouble) {
  return train([](Net&) {}, step, [](const at::Tensor& x) { return x; }, dtype);
}

inline void compare(const std::string& what, const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected,
                    double tolerance) {
  require(got.size() == expected.size(), "test", "{}: {} tensors", what, got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    require(got[i].defined() == expected[i].defined(), "test", "{} {} {} there", what, i, got[i].defined() ? "is" : "is not");
    if (!got[i].defined()) continue;
    const bool same = tolerance == 0 ? got[i].equal(expected[i]) : at::allclose(got[i], expected[i], tolerance, tolerance);
    require(same, "test", "{} {} differs by {}", what, i, (got[i] - expected[i]).abs().max().item<double>());
  }
}

// Trains on the mesh, the batch cut over its first dimensions, and compares with `expected`.
inline void check(const Result& expected, std::vector<int64_t> sizes, const std::vector<std::string>& names, Placements batch,
                  const LayOut& lay_out, const TrainStep& step = plain_step, double tolerance = 1e-10, at::ScalarType dtype = at::kDouble,
                  const char* transport = "threads") {
  CHECK_NOTHROW(on_mesh(
      sizes,
      [&](const DeviceMesh& plain) {
        const DeviceMesh mesh(c10::kCPU, plain.ranks(), sizes, names);
        Spmd spmd(mesh);
        const auto result = train(lay_out, step, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, batch).tensor(); }, dtype);
        compare("gradient", result.gradients, expected.gradients, tolerance);
        compare("parameter", result.parameters, expected.parameters, tolerance);
      },
      transport));
}

inline LayOut sharded(FullyShardOptions options = {}, std::initializer_list<std::string_view> dims = {"dp"}) {
  return [options, dims = std::vector<std::string_view>(dims)](Net& net) {
    const auto& mesh = *Spmd::current();
    fully_shard(*net, dims.size() == 1 ? mesh[dims[0]] : mesh[{dims[0], dims[1]}], options);
  };
}

inline FullyShardOptions with(const std::function<void(FullyShardOptions&)>& change) {
  FullyShardOptions options;
  change(options);
  return options;
}

inline const std::vector<std::pair<const char*, FullyShardOptions>> kOptions{
    {"ZeRO-3", {}},
    {"ZeRO-2", with([](auto& o) { o.reshard_after_forward = false; })},
    {"ZeRO-1", with([](auto& o) { o.reshard_after_forward = false, o.reduce_at_read = true; })},
    {"one whole unit", with([](auto& o) { o.max_whole_units = 1; })},
    {"three whole units", with([](auto& o) { o.max_whole_units = 3; })},
    {"by bytes", with([](auto& o) { o.unit_bytes = 3000; })},
    {"by pattern", with([](auto& o) { o.units = {"blocks.0|blocks.2", "tokens"}; })},
    {"blocks", with([](auto& o) { o.block = 8; })},
};

}  // namespace dtensor::test::sharding
