// torch::nn::init on parameters that are cut, inside Spmd and outside of it: the bits of one device.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace init = torch::nn::init;

namespace {

struct Initializer {
  const char* name;
  std::vector<int64_t> sizes;
  std::function<void(at::Tensor)> run;
};

const std::vector<Initializer> kInitializers{
    {"constant_", {6, 4}, [](at::Tensor x) { init::constant_(x, 0.5); }},
    {"ones_", {6, 4}, [](at::Tensor x) { init::ones_(x); }},
    {"zeros_", {6, 4}, [](at::Tensor x) { init::zeros_(x); }},
    {"uniform_", {6, 4}, [](at::Tensor x) { init::uniform_(x, -1, 1); }},
    {"normal_", {6, 4}, [](at::Tensor x) { init::normal_(x, 1, 2); }},
    {"eye_", {6, 4}, [](at::Tensor x) { init::eye_(x); }},
    {"dirac_", {6, 4, 3}, [](at::Tensor x) { init::dirac_(x); }},
    {"dirac_ of planes", {4, 6, 3, 5}, [](at::Tensor x) { init::dirac_(x); }},
    {"orthogonal_", {6, 4}, [](at::Tensor x) { init::orthogonal_(x, 0.5); }},
    {"orthogonal_ of a wide one", {4, 3, 2}, [](at::Tensor x) { init::orthogonal_(x); }},
    {"sparse_", {6, 4}, [](at::Tensor x) { init::sparse_(x, 0.4); }},
    {"xavier_uniform_", {6, 4}, [](at::Tensor x) { init::xavier_uniform_(x, 0.7); }},
    {"xavier_normal_", {6, 4, 3}, [](at::Tensor x) { init::xavier_normal_(x); }},
    {"kaiming_uniform_", {6, 4}, [](at::Tensor x) { init::kaiming_uniform_(x); }},
    {"kaiming_normal_", {6, 4}, [](at::Tensor x) { init::kaiming_normal_(x, 0.1, torch::kFanOut); }},
};

// The numbers that follow are compared too: an initializer takes as many as on one device.
Tensors initialized(const Initializer& initializer, at::Tensor parameter) {
  torch::manual_seed(11);
  initializer.run(parameter);
  return {parameter.detach(), torch::rand({3})};
}

void check_on(const Initializer& initializer, const DeviceMesh& mesh, bool inside) {
  const auto plain = torch::full(initializer.sizes, 7.0);
  const auto expected = initialized(initializer, plain.clone().requires_grad_());
  for (const auto& placement : {replicate(), shard(0), shard(1)}) {
    const auto parameter = distribute_tensor(plain, mesh, {placement}).tensor().detach().requires_grad_();
    Tensors got;
    {
      std::unique_ptr<Spmd> spmd(inside ? std::make_unique<Spmd>(mesh) : nullptr);
      got = initialized(initializer, parameter);
    }
    dtensor::require(DTensor(parameter).placements()[0] == placement && parameter.requires_grad(), "test", "{}: the layout changed",
                     initializer.name);
    for (size_t i = 0; i < got.size(); ++i) {
      dtensor::require(full_tensor(got[i]).equal(expected[i]), "test", "{} of {}, {} Spmd: result {} differs", initializer.name,
                       placement.str(), inside ? "inside" : "outside", i);
    }
  }
}

}  // namespace

TEST_CASE("init: torch::nn::init on cut parameters gives the bits of one device", "[init]") {
  for (const auto& initializer : kInitializers) {
    INFO(initializer.name);
    for (const bool inside : {true, false}) {
      for (const int64_t ranks : {2, 3})
        CHECK_NOTHROW(on_mesh({ranks}, [&](const DeviceMesh& mesh) { check_on(initializer, mesh, inside); }));
    }
  }
  CHECK_NOTHROW(on_mesh(
      {2}, [](const DeviceMesh& mesh) { check_on(kInitializers[10], mesh, false); }, "shm"));
}

TEST_CASE("init: what is written to a parameter outside Spmd is compared between ranks each time", "[init]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto parameter = distribute_tensor(torch::zeros({4, 2}), mesh, {shard(0)}).tensor().detach().requires_grad_();
    const auto refuses = [&](const at::Tensor& value, const char* text) {
      try {
        parameter.copy_(value);
      } catch (const c10::Error& error) {
        return std::string(error.what()).find(text) != std::string::npos;
      }
      return false;
    };
    {
      const torch::NoGradGuard guard;
      parameter.copy_(torch::ones({4, 2}));
      dtensor::require(full_tensor(parameter.detach()).equal(torch::ones({4, 2})), "test", "the value");
      dtensor::require(refuses(torch::full({4, 2}, 1.0 + mesh.world().rank()), "differ"), "test", "ranks that hold different values");
    }
    dtensor::require(refuses(torch::ones({4, 2}), "leaf") || refuses(torch::ones({4, 2}), "plain tensor"), "test", "with gradients on");
    const auto sum = parameter.detach();
    bool refused = false;
    try {
      sum.add(torch::ones({4, 2}));
    } catch (const Error&) {
      refused = true;
    }
    dtensor::require(refused, "test", "what makes a new tensor");
  }));
}
