// What programs that were written for one device do besides a plain training loop: scripted modules, transfer learning, data parallelism by
// hand.
#include "tests/support/torch_files_support.hpp"

#include <torch/script.h>

#include <optional>

namespace dt = dtensor;
using namespace dt::test;

namespace {

constexpr int kRounds = 4;

at::Tensor waves(std::vector<int64_t> sizes, double pace) {
  return torch::arange(c10::multiply_integers(sizes), torch::kDouble).mul(pace).sin().reshape(sizes);
}

using Place = std::function<torch::Tensor(const torch::Tensor&)>;
torch::Tensor as_it_is(const torch::Tensor& x) { return x; }

void near(const torch::Tensor& got, const torch::Tensor& expected, const std::string& what) {
  const auto whole = dt::full_tensor(got.detach());
  dt::require(whole.sizes() == expected.sizes() && whole.allclose(expected.detach(), 1e-11, 1e-12), "test", "{} differs", what);
}

// -- Scripted modules ----------------------------------------------------------------------------------------------------------

// A file of torch::jit, of a module with a loop, a branch on the sizes and a submodule.
std::string scripted() {
  torch::jit::Module inner("inner");
  inner.register_parameter("weight", waves({6, 5}, 0.3), /*is_buffer=*/false);
  inner.register_buffer("shift", waves({6}, 0.7));
  inner.define("def forward(self, x):\n    return torch.relu(torch.linear(x, self.weight)) + self.shift\n");
  torch::jit::Module outer("outer");
  outer.register_parameter("scale", torch::ones({1}, torch::kDouble) * 1.5, /*is_buffer=*/false);
  outer.register_module("inner", inner);
  outer.define(R"(
def forward(self, x, times: int):
    y = self.inner.forward(x)
    for i in range(times):
        y = y * self.scale + float(i)
    if y.size(0) > 2:
        y = torch.softmax(y, 1) + y.sum(1, keepdim=True).tanh()
    return y
)");
  std::ostringstream out;
  outer.save(out);
  return out.str();
}

torch::jit::Module read(const std::string& file) {
  dt::NoSpmd plain;
  std::istringstream in(file);
  auto module = torch::jit::load(in);
  for (const auto& parameter : module.parameters()) parameter.set_requires_grad(true);
  return module;
}

struct Answers {
  std::vector<torch::Tensor> results, gradients;
};

// The profiling executor changes the program with the calls: so several.
Answers answers(torch::jit::Module module, const Place& place) {
  Answers all;
  for (int i = 0; i < kRounds; ++i) {
    const auto x = place(waves({8, 5}, 0.21 + 0.1 * i)).requires_grad_();
    for (const auto& p : module.parameters()) p.mutable_grad() = torch::Tensor();
    const auto y = module.forward({x, 3}).toTensor();
    y.square().sum().backward();
    all.results.push_back(dt::full_tensor(y.detach()));
    all.gradients.push_back(dt::full_tensor(x.grad()));
    for (const auto& p : module.parameters()) all.gradients.push_back(dt::full_tensor(p.grad()).clone());
  }
  return all;
}

void compare(const Answers& got, const Answers& expected) {
  for (size_t i = 0; i < expected.results.size(); ++i) near(got.results[i], expected.results[i], "result " + std::to_string(i));
  for (size_t i = 0; i < expected.gradients.size(); ++i) near(got.gradients[i], expected.gradients[i], "gradient " + std::to_string(i));
}

}  // namespace

TEST_CASE("foreign: a scripted module takes distributed inputs", "[foreign]") {
  const auto file = scripted();
  const auto expected = answers(read(file), as_it_is);
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto* transport : {"threads", "gloo"}) {
      CAPTURE(ranks, transport);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](dt::World& world) {
            const auto mesh = line(world);
            dt::Spmd spmd(mesh);
            for (const auto& placement : {dt::replicate(), dt::shard(0), dt::shard(1)}) {
              const auto place = [&](const torch::Tensor& x) { return dt::distribute_tensor(x, mesh, {placement}).tensor(); };
              compare(answers(read(file), place), expected);
            }
          },
          transport));
    }
  }
}

namespace {

// -- Transfer learning ---------------------------------------------------------------------------------------------------------

struct ClassifierImpl : torch::nn::Module {
  explicit ClassifierImpl(int64_t classes) {
    features =
        register_module("features", torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)),
                                                          torch::nn::BatchNorm2d(4), torch::nn::ReLU(), torch::nn::AdaptiveAvgPool2d(2)));
    fc = register_module("fc", torch::nn::Linear(16, classes));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return fc(features->forward(x).flatten(1)); }
  torch::nn::Sequential features{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Classifier);

// A trained model of seven classes is read, its features are frozen, and another last layer, of three classes, is trained.
template <class Load>
Classifier transfer(const Load& load, const Place& place, const std::function<void(torch::nn::Module&)>& lay_out) {
  torch::manual_seed(5);
  Classifier model(7);
  load(model);
  for (auto& p : model->features->parameters()) p.set_requires_grad(false);
  model->unregister_module("fc");
  model->fc = model->register_module("fc", torch::nn::Linear(16, 3));
  model->fc->to(torch::kDouble);
  lay_out(*model);
  torch::optim::SGD optimizer(model->fc->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kRounds; ++step) {
    const auto x = place(waves({6, 2, 5, 5}, 0.11 + 0.01 * step)), y = place(torch::arange(6).add(step).remainder(3));
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model(x), y).backward();
    optimizer.step();
  }
  return model;
}

}  // namespace

TEST_CASE("foreign: transfer learning", "[foreign][files]") {
  const Folder folder;
  torch::manual_seed(1);
  torch::save(Classifier(7), folder / "trained.pt");
  const auto expected = transfer([&](auto& model) { torch::load(model, folder / "trained.pt"); }, as_it_is, [](auto&) {});
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool sharded : {false, true}) {
      CAPTURE(ranks, sharded);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](dt::World&) {
            const auto mesh = dt::init_device_mesh(torch::kCPU, {ranks}, {"dp"});
            dt::Spmd spmd(mesh);
            const auto model =
                transfer([&](auto& m) { sharded ? dt::load(m, folder / "trained.pt") : torch::load(m, folder / "trained.pt"); },
                         [&](const torch::Tensor& x) { return dt::distribute_tensor(x, mesh, {dt::shard(0)}).tensor(); },
                         [&](torch::nn::Module& m) {
                           if (sharded) dt::fully_shard(m, mesh);
                         });
            const auto a = tensors_of(*model), b = tensors_of(*expected);
            for (size_t i = 0; i < b.size(); ++i) near(a[i].second, b[i].second, a[i].first);
          },
          ranks == 3 ? "shm" : "threads"));
    }
  }
}

TEST_CASE("foreign: torch::load and torch::save of what is cut say what to call", "[foreign][files]") {
  const Folder folder;
  torch::save(Classifier(7), folder / "model.pt");
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](dt::World& world) {
          const auto mesh = line(world);
          dt::Spmd spmd(mesh);
          Classifier model(7);
          const auto hints = [&](const auto& call, const std::string& hint) {
            try {
              call();
            } catch (const dt::Error& error) {
              const std::string text = error.what_without_backtrace();
              dt::require(text.find(hint) != std::string::npos, "test", "got '{}'", text);
              return;
            }
            dt::fail("test", "nothing was thrown");
          };
          dt::parallelize_module(*model, mesh, {{"fc.weight", {{"tp", dt::shard(0)}}}});
          hints([&] { torch::load(model, folder / "model.pt"); }, "dt::load(module, path)");
          hints([&] { torch::save(model, folder / ("rank" + std::to_string(world.rank()))); }, "dt::save");
        },
        transport));
  }
}

namespace {

// -- Data parallelism by hand: plain modules, and a loop over their gradients -----------------------------------------------------

Classifier by_hand(const std::optional<dt::DeviceMesh>& mesh) {
  torch::manual_seed(5);
  Classifier model(3);
  model->eval();  // so that batch norm is no sum over the batch
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < kRounds; ++step) {
    auto x = waves({12, 2, 5, 5}, 0.11 + 0.01 * step), y = torch::arange(12).add(step).remainder(3);
    if (mesh) x = x.chunk(mesh->size())[mesh->coordinate(0)], y = y.chunk(mesh->size())[mesh->coordinate(0)];
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model(x), y).backward();
    if (mesh) {
      for (const auto& p : model->parameters()) {
        p.mutable_grad() = mesh->communicator(0).all_reduce(p.grad(), dt::ReduceOp::sum).get().div_(mesh->size());
      }
    }
    optimizer.step();
  }
  return model;
}

}  // namespace

TEST_CASE("foreign: data parallelism by hand", "[foreign]") {
  const auto expected = by_hand(std::nullopt);
  for (const auto* transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {2, 3, 4}) {
      CAPTURE(ranks, transport);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](dt::World& world) {
            const auto model = by_hand(line(world));
            const auto a = tensors_of(*model), b = tensors_of(*expected);
            for (size_t i = 0; i < b.size(); ++i) near(a[i].second, b[i].second, a[i].first);
          },
          transport));
    }
  }
}
