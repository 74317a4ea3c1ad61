// Files of modules, optimizers, tensors, schedulers and scalers, and the states of generators.
#include "tools/fuzz_bytes/target.hpp"

#include <dtensor/checkpoint/torch_files.hpp>
#include <dtensor/dtensor.hpp>
#include <dtensor/optim/lamb.hpp>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <memory>

namespace dtensor::fuzz_bytes {

namespace {

std::string file() { return scratch() + "/file.pt"; }

template <class Value>
std::string saved(const Value& value) {
  save(value, file());
  return read_bytes(file());
}

template <class Value>
void load_bytes(Value& value, const std::string& bytes) {
  write_bytes(file(), bytes);
  load(value, file());
}

DeviceMesh one_rank() { return init_device_mesh(c10::kCPU, {1}, {"one"}); }

torch::nn::Sequential& model() {
  static torch::nn::Sequential all(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2));
  return all;
}

// Distributed parameters, of which the optimizer remembers something.
std::vector<at::Tensor>& parameters() {
  static std::vector<at::Tensor> all = [] {
    std::vector<at::Tensor> list;
    for (const auto& whole : {at::ones({3, 4}), at::ones({5})}) {
      list.push_back(distribute_tensor(whole, one_rank(), {shard(0)}));
      list.back().set_requires_grad(true);
    }
    return list;
  }();
  return all;
}

template <class Optimizer>
Optimizer& stepped(Optimizer& optimizer) {
  for (auto& parameter : parameters()) parameter.mutable_grad() = at::ones_like(parameter);
  optimizer.step([] { return at::ones({}); });
  return optimizer;
}

torch::optim::Adam& adam() {
  static torch::optim::Adam optimizer(parameters(), torch::optim::AdamOptions(0.1).amsgrad(true));
  return stepped(optimizer);
}

torch::optim::SGD& sgd() {
  static torch::optim::SGD optimizer(parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  return stepped(optimizer);
}

torch::optim::LBFGS& lbfgs() {
  static torch::optim::LBFGS optimizer(parameters(), torch::optim::LBFGSOptions(0.1).history_size(3).max_iter(2));
  return stepped(optimizer);
}

optim::Lamb& lamb() {
  static optim::Lamb optimizer(parameters(), optim::LambOptions(0.1));
  return stepped(optimizer);
}

lr::Scheduler& scheduler() {
  static lr::Scheduler one(sgd(), lr::warmup(10));
  return one;
}

GradScaler& scaler() {
  static GradScaler one;
  return one;
}

// What is loaded can be gone on with.
template <auto& get>
Target optimizer_target(const char* name, const char* what) {
  return {name, what, [] { return std::vector{saved(get()), saved(model()), saved(std::vector{at::ones({2})})}; },
          [](const std::string& bytes) {
            static auto& optimizer = get();
            load_bytes(optimizer, bytes);
            optimizer.step([] { return at::ones({}); });
          }};
}

void set_state(at::Generator generator, const std::string& bytes) {
  auto copy = bytes;
  generator.set_state(at::from_blob(copy.data(), {static_cast<int64_t>(copy.size())}, at::kByte).clone());
}

std::vector<std::string> states_of(const at::Generator& generator) {
  const auto state = generator.get_state();
  return {{static_cast<const char*>(state.data_ptr()), static_cast<size_t>(state.numel())}};
}

}  // namespace

std::vector<Target> file_targets() {
  std::vector<Target> all;
  all.push_back({"module", "dt::load of a module", [] { return std::vector{saved(model()), saved(torch::nn::Linear(4, 3))}; },
                 [](const std::string& bytes) { load_bytes(model(), bytes); }});
  all.push_back(optimizer_target<adam>("adam", "dt::load of libtorch's Adam with distributed parameters"));
  all.push_back(optimizer_target<sgd>("sgd", "dt::load of libtorch's SGD with distributed parameters"));
  all.push_back(optimizer_target<lbfgs>("lbfgs", "dt::load of libtorch's LBFGS with distributed parameters"));
  all.push_back(optimizer_target<lamb>("lamb", "dt::load of an optimizer of this library"));
  all.push_back({"tensors", "dt::load of tensors",
                 [] { return std::vector{saved(std::vector{at::ones({3, 2}), at::ones({5}, at::kLong)})}; },
                 [](const std::string& bytes) {
                   std::vector<at::Tensor> tensors;
                   load_bytes(tensors, bytes);
                   for (auto& tensor : tensors) tensor.clone();
                 }});
  all.push_back({"scheduler", "dt::load of an lr::Scheduler", [] { return std::vector{saved(scheduler())}; },
                 [](const std::string& bytes) { load_bytes(scheduler(), bytes); }});
  all.push_back({"scaler", "dt::load of a GradScaler", [] { return std::vector{saved(scaler())}; },
                 [](const std::string& bytes) { load_bytes(scaler(), bytes); }});
  all.push_back({"generator", "the state of a rank's generator, and what is drawn then",
                 [] { return states_of(World::current().generator()); },
                 [](const std::string& bytes) {
                   set_state(World::current().generator(), bytes);
                   rand({7, 3}, one_rank(), {shard(0)});
                   at::randn({5});
                 }});
  all.push_back({"dt-generator", "the state of a dt::Generator, and what is drawn then", [] { return states_of(Generator(3)); },
                 [](const std::string& bytes) {
                   Generator generator(1);
                   set_state(generator, bytes);
                   at::ones({7}).normal_(0, 1, generator);
                 }});
  return all;
}

}  // namespace dtensor::fuzz_bytes
