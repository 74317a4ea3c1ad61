// Losses of a pipeline: scaled ones, sums over all tokens, those of middle stages, and steps that add up. One device's numbers.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/pipeline.hpp>
#include <dtensor/training/grad_scaler.hpp>

#include <torch/torch.h>

#include <thread>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kDim = 6, kClasses = 5, kIgnored = -100;
using Tensors = std::vector<at::Tensor>;

// Layers that each have a loss of their own, as a router of experts has.
struct Routed : torch::nn::Module {
  explicit Routed(int count) {
    for (int i = 0; i < count; ++i) layers.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(kDim, kDim)));
    head = register_module("head", torch::nn::Linear(kDim, kClasses));
  }
  at::Tensor layer(size_t i, const at::Tensor& x) { return x + torch::tanh(layers[i](x)); }
  static at::Tensor balance(const at::Tensor& x) { return x.softmax(-1).square().mean(); }

  // The head gives its scores and the sum of the layers' losses.
  std::vector<Piece> pieces() {
    std::vector<Piece> all;
    std::vector<std::string> names;
    for (size_t i = 0; i < layers.size(); ++i) {
      names.push_back("balance " + std::to_string(i));
      const auto run = [this, i](const at::Tensor& x) {
        const auto y = layer(i, x);
        return Tensors{y, balance(y)};
      };
      all.push_back(piece("l" + std::to_string(i), run, {.gives = {names.back()}}));
    }
    const auto last = [this](const Tensors& x) {
      auto sum = x[1];
      for (size_t i = 2; i < x.size(); ++i) sum = sum + x[i];
      return Tensors{head(x[0]), sum};
    };
    all.push_back(piece("head", last, {.takes = names}));
    return all;
  }
  Tensors forward(at::Tensor x) {
    at::Tensor sum;
    for (size_t i = 0; i < layers.size(); ++i) {
      x = layer(i, x);
      sum = i == 0 ? balance(x) : sum + balance(x);
    }
    return {head(x), sum};
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear head{nullptr};
};

// [12, kDim] and [12] classes, of which some are ignored, more of them at the end.
std::pair<at::Tensor, at::Tensor> batch() {
  auto classes = torch::arange(12).remainder(kClasses);
  for (const int i : {1, 6, 8, 9, 11}) classes[i] = kIgnored;
  return {torch::arange(12 * kDim).view({12, kDim}).to(at::kFloat).sin(), classes};
}

// The sum over the tokens that count, divided by how many they are in the whole batch.
at::Tensor total_loss(const Tensors& y, const at::Tensor& classes) {
  const auto tokens = batch().second.ne(kIgnored).sum().item<double>();
  return at::cross_entropy_loss(y[0], classes, {}, at::Reduction::Sum, kIgnored) / tokens + 0.125 * y[1];
}

struct Result {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients;
};

using Scale = std::function<at::Tensor(const at::Tensor&)>;
at::Tensor unscaled(const at::Tensor& loss) { return loss; }

Result on_one_device(int microbatches, int steps, const Scale& scale = unscaled) {
  torch::manual_seed(4);
  Routed model(3);
  const auto [x, y] = batch();
  Result result;
  for (int step = 0; step < steps; ++step) {
    result.losses.clear();
    for (int i = 0; i < microbatches; ++i) {
      const auto loss = scale(total_loss(model.forward(x.tensor_split(microbatches)[i]), y.tensor_split(microbatches)[i]));
      loss.backward();
      result.losses.push_back(loss.item<double>());
    }
  }
  for (const auto& item : model.named_parameters()) result.gradients[item.key()] = item.value().grad();
  return result;
}

Result on_a_pipeline(const DeviceMesh& mesh, const PipelineOptions& options, int steps, const Scale& scale = unscaled) {
  const Spmd spmd(stage_mesh(mesh));
  torch::manual_seed(4);
  Routed model(3);
  auto pipe = pipeline(model, mesh, model.pieces(), options);
  const auto [x, y] = batch();
  Result result;
  for (int step = 0; step < steps; ++step) {
    const auto loss = [&](const Tensors& outputs, const at::Tensor& classes) { return scale(total_loss(outputs, classes)); };
    result.losses = pipe.step(x, y, loss, /*sync=*/step + 1 == steps).losses;
  }
  for (const auto& [name, parameter] : pipe.named_parameters()) result.gradients[name] = full_tensor(parameter.grad());
  return result;
}

void check_equal(const Result& got, const Result& expected) {
  require(got.losses == expected.losses, "test", "losses differ: {} and {}", fmt::join(got.losses, " "), fmt::join(expected.losses, " "));
  for (const auto& [name, gradient] : got.gradients) {
    require(gradient.equal(expected.gradients.at(name)), "test", "the gradient of '{}' differs", name);
  }
}

}  // namespace

TEST_CASE("pipeline losses: of all tokens and of middle stages and over several steps", "[pipeline]") {
  const GradScaler scaler({.init_scale = 1024});
  const Scale scaled = [&](const at::Tensor& loss) { return scaler.scale(loss); };
  for (const int steps : {1, 3}) {
    for (const auto& scale : {Scale(unscaled), scaled}) {
      const auto expected = on_one_device(4, steps, scale);
      for (const std::string name : {"gpipe", "1f1b", "zb1p", "zbv"}) {
        for (const std::string transport : {"threads", "shm"}) {
          CAPTURE(steps, name, transport);
          REQUIRE_NOTHROW(on_ranks(
              2,
              [&](World&) {
                const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
                check_equal(on_a_pipeline(mesh, {.schedule = name, .microbatches = 4}, steps, scale), expected);
              },
              transport));
        }
      }
    }
  }
}

TEST_CASE("pipeline losses: a gradient that is not finite makes all stages skip the step", "[pipeline]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
    const Spmd spmd(stage_mesh(mesh));
    torch::manual_seed(4);
    Routed model(3);
    auto pipe = pipeline(model, mesh, model.pieces(), {.microbatches = 4});
    torch::optim::SGD optimizer(pipe.parameters(), 0.1);
    GradScaler scaler;
    const auto [x, y] = batch();
    for (const bool infinite : {true, false}) {
      optimizer.zero_grad();
      pipe.step(x, y, [&](const Tensors& outputs, const at::Tensor& classes) { return scaler.scale(total_loss(outputs, classes)); });
      if (infinite && world.rank() == 0) pipe.parameters()[0].mutable_grad().fill_(INFINITY);  // of the first stage only
      scaler.unscale_(optimizer, mesh["pp"]);
      require(scaler.step(optimizer) == !infinite, "test", "rank {} made another decision", world.rank());
      scaler.update();
    }
  }));
}

TEST_CASE("pipeline losses: a rank that is late changes nothing", "[pipeline]") {
  const auto expected = on_one_device(4, 1);
  for (const int late : {0, 1, 2}) {
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      CAPTURE(late, transport);
      REQUIRE_NOTHROW(on_ranks(
          3,
          [&](World& world) {
            const auto mesh = init_device_mesh(c10::kCPU, {3}, {"pp"});
            if (world.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
            const Spmd spmd(stage_mesh(mesh));
            torch::manual_seed(4);
            Routed model(3);
            auto pieces = model.pieces();
            for (auto& piece : pieces) {
              piece.forward = [&, forward = piece.forward](const Tensors& inputs) {
                if (world.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
                return forward(inputs);
              };
            }
            auto pipe = pipeline(model, mesh, pieces, {.microbatches = 4});
            const auto [x, y] = batch();
            Result result{pipe.step(x, y, total_loss).losses, {}};
            for (const auto& [name, parameter] : pipe.named_parameters()) result.gradients[name] = full_tensor(parameter.grad());
            check_equal(result, expected);
          },
          transport));
    }
  }
}

TEST_CASE("pipeline losses: what is refused", "[pipeline][errors]") {
  const auto refused = [](const auto& loss, const std::string& message) {
    CAPTURE(message);
    CHECK_THROWS_WITH(on_ranks(2,
                               [&](World&) {
                                 const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
                                 const Spmd spmd(stage_mesh(mesh));
                                 Routed model(3);
                                 const auto [x, y] = batch();
                                 pipeline(model, mesh, model.pieces(), {.microbatches = 2}).step(x, y, loss);
                               }),
                      says(message));
  };
  refused([](const at::Tensor& y, const at::Tensor&) { return y.sum(); }, "the last piece gives 2 tensors, and the loss takes one");
  refused([](const Tensors& y, const at::Tensor&) { return y[0]; }, "expected one element; hint: sum() or mean() it");
  refused([](const Tensors&, const at::Tensor&) { return at::Tensor(); }, "the loss is an undefined tensor");
  refused([](const Tensors& y, const at::Tensor&) { return y[0].detach().sum(); }, "the loss needs no gradient");
}
