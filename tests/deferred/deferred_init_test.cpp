// Modules constructed without memory get, part by part, the values of construction on one device.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include "src/dispatch/deferred.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <sstream>

using namespace dtensor;
using namespace dtensor::test;

namespace {

namespace nn = torch::nn;

// Stock modules, tied parameters, and what users do to parameters when they make them.
struct ZooImpl : nn::Module {
  ZooImpl() {
    embedding = register_module("embedding", nn::Embedding(nn::EmbeddingOptions(70, 32).padding_idx(3)));
    convolution = register_module("convolution", nn::Conv2d(nn::Conv2dOptions(3, 8, 3)));
    norm = register_module("norm", nn::BatchNorm2d(8));
    attention = register_module("attention", nn::MultiheadAttention(32, 4));
    lstm = register_module("lstm", nn::LSTM(12, 20));
    layer_norm = register_module("layer_norm", nn::LayerNorm(nn::LayerNormOptions({32})));
    for (int i = 0; i < 3; ++i) linears.push_back(register_module("linear" + std::to_string(i), nn::Linear(32, 48 + i)));
    head = register_module("head", nn::Linear(nn::LinearOptions(32, 70).bias(false)));
    tied = register_parameter("tied", embedding->weight);

    torch::NoGradGuard no_grad;
    nn::init::orthogonal_(linears[0]->weight);
    nn::init::xavier_normal_(linears[1]->weight, 0.7);
    nn::init::sparse_(linears[2]->weight, 0.2);
    for (auto& linear : linears) linear->bias.fill_(0.1).mul_(linear->weight.size(0));
    linears[1]->bias.slice(0, 0, 48).copy_(linears[0]->bias);
    linears[0]->bias[5] = 7;
    scale = register_parameter("scale", torch::randn({40, 30}) * 0.02 + torch::rand({30}));
    scale.div_(scale.norm());
    if (scale.sum().item<double>() > 1e6) scale.zero_();
    mask = register_buffer("mask", torch::ones({24, 24}).tril());
    steps = register_buffer("steps", torch::arange(12).to(torch::kFloat).pow(-0.5).reshape({3, 4}));
    order = register_buffer("order", torch::randperm(37));
    picks = register_buffer("picks", torch::randint(3, 90, {1500}));
    flat = register_parameter("flat", torch::empty({2, 600}).normal_());
    corner = flat.detach().slice(1, 0, 200).uniform_(2, 3);
    half = register_parameter("half", torch::randn({1100}, torch::kBFloat16));
    like = register_parameter("like", torch::rand_like(scale, torch::kDouble).bernoulli_(0.3));
    chosen = register_buffer("chosen", torch::multinomial(torch::rand({9}).softmax(0), 4));
    // Sums in the order of memory: transposed, with gaps, expanded.
    auto matrix = register_parameter("matrix", torch::randn({37, 53}));
    register_buffer("product", matrix.t().mv(torch::ones({37}) / 3));
    register_buffer("sums", torch::stack({matrix.t().sum(), matrix.slice(1, 2, 50).norm(), matrix.slice(1, 3, 4).expand({37, 50}).sum()}));
    for (int i = 0; i < 3; ++i) matrix[i].div_(matrix[i].norm());
    for (int i = 0; i < 3; ++i) matrix.select(1, i).mul_(matrix.select(1, i).sum());
    auto complex = register_parameter("complex", torch::randn({7, 11}, torch::kComplexFloat));
    complex.mul_(complex).div_(torch::randn({11}, torch::kComplexFloat));
    frozen = register_parameter("frozen", torch::zeros({6, 4}).masked_fill_(torch::eye(6, 4) > 0, 2), false);
  }
  nn::Embedding embedding{nullptr};
  nn::Conv2d convolution{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::MultiheadAttention attention{nullptr};
  nn::LSTM lstm{nullptr};
  nn::LayerNorm layer_norm{nullptr};
  std::vector<nn::Linear> linears;
  nn::Linear head{nullptr};
  torch::Tensor tied, scale, mask, steps, order, picks, flat, corner, half, like, chosen, frozen;
};
TORCH_MODULE(Zoo);

// Names and values, whole.
std::vector<std::pair<std::string, at::Tensor>> values_of(const nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : module.named_parameters()) all.emplace_back(item.key(), full_tensor(item.value().detach()).clone());
  for (const auto& item : module.named_buffers()) all.emplace_back(item.key(), full_tensor(item.value()).clone());
  return all;
}

bool is_cut_or_short(const at::Tensor& tensor, const Layout& layout) {
  return tensor.storage().nbytes() <= static_cast<size_t>(c10::multiply_integers(layout.local_sizes())) * tensor.element_size();
}

}  // namespace

TEST_CASE("deferred init: any module on any mesh has the values of one device", "[deferred]") {
  torch::manual_seed(11);
  Zoo plain;
  const auto expected = values_of(*plain);
  const auto next = torch::rand({5});
  struct Case {
    std::vector<int64_t> sizes;
    const char* transport;
    Placement placement;
  };
  for (const auto& [sizes, transport, placement] : std::vector<Case>{{{1}, "threads", shard(0)},
                                                                     {{2}, "threads", shard(0)},
                                                                     {{3}, "threads", shard(-1)},
                                                                     {{4}, "threads", replicate()},
                                                                     {{2, 2}, "threads", shard(0)},
                                                                     {{8}, "threads", shard(0)},
                                                                     {{2}, "gloo", shard(-1)},
                                                                     {{3}, "gloo", shard(0)}}) {
    INFO(sizes.size() << "-d mesh of " << sizes[0] << ", " << transport << ", " << placement.str());
    CHECK_NOTHROW(on_mesh(
        sizes,
        [&](const DeviceMesh& mesh) {
          torch::manual_seed(11);
          auto model = [&] {
            DeferredInit deferred(mesh);
            return Zoo();
          }();
          require(torch::rand({5}).equal(next), "test", "the generator went on otherwise");
          require(is_deferred(model->scale) && is_deferred(model->corner), "test", "is not deferred");
          const auto lay_out = [&](const at::Tensor& tensor) {
            if (tensor.dim() > 0) redistribute_(tensor, Placements(mesh.ndim(), placement));
          };
          for (const auto& tensor : model->parameters()) lay_out(tensor);
          for (const auto& tensor : model->buffers()) lay_out(tensor);
          materialize(*model);
          for (const auto& tensor : model->parameters()) {
            const DTensor part(tensor.detach());
            require(!is_deferred(tensor) && is_cut_or_short(part.to_local(), part.layout()), "test", "a part of {} has the memory of more",
                    part.layout().str());
            require(tensor.dim() == 0 || part.placements()[0] == part.layout().with(Placements(mesh.ndim(), placement))->placements()[0],
                    "test", "is not laid out as asked: {}", part.layout().str());
          }
          const auto got = values_of(*model);
          require(got.size() == expected.size(), "test", "{} tensors", got.size());
          for (size_t i = 0; i < got.size(); ++i) {
            require(got[i].second.equal(expected[i].second), "test", "{} differs", got[i].first);
          }
          require(model->tied.is_same(model->embedding->weight), "test", "what was tied is not");
        },
        transport));
  }
}

TEST_CASE("deferred init: what shares memory goes on sharing it", "[deferred]") {
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    at::Tensor base, view, detached, other;
    {
      DeferredInit deferred(mesh);
      base = torch::zeros({6, 4});
      view = base.t();
      detached = base.data();
      other = torch::ones({3});
    }
    redistribute_(base, {shard(0)});
    materialize(base);
    require(!is_deferred(view) && !is_deferred(detached) && is_deferred(other), "test", "not those that share memory");
    base.add_(1);
    detached.add_(1);
    view.add_(1);
    require(full_tensor(base).equal(torch::full({6, 4}, 3)) && full_tensor(view).equal(torch::full({4, 6}, 3)), "test",
            "a write is missed");
    materialize(other);
    materialize(other);
    require(full_tensor(other).equal(torch::ones({3})), "test", "other values");
  }));
}

TEST_CASE("deferred init: what is given a layout of its own shares memory no longer", "[deferred]") {
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    torch::nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
    {
      DeferredInit deferred(mesh);
      a = torch::nn::Linear(8, 8), b = torch::nn::Linear(8, 8), c = torch::nn::Linear(8, 8);
      b->weight.set_data(a->weight);
      c->weight.set_data(a->weight);
    }
    redistribute_(a->weight, {shard(0)});
    redistribute_(b->weight, {shard(1)});
    materialize({a->weight, b->weight});
    const auto lies = [](const torch::nn::Linear& layer, const Placement& placement) {
      return DTensor(layer->weight).placements()[0] == placement;
    };
    require(lies(a, shard(0)) && lies(b, shard(1)) && lies(c, shard(0)), "test", "{} {} {}", DTensor(a->weight).layout().str(),
            DTensor(b->weight).layout().str(), DTensor(c->weight).layout().str());
    require(full_tensor(a->weight).equal(full_tensor(b->weight)), "test", "other values");
  }));
}

TEST_CASE("deferred init: a tensor with values is written at once", "[deferred]") {
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    const auto plain = torch::zeros({4});
    at::Tensor cut = dtensor::zeros({4}, mesh, {shard(0)}), made;
    {
      DeferredInit deferred(mesh);
      made = torch::arange(4).to(torch::kFloat) + torch::ones({4});
      plain.add_(made).slice(0, 2).copy_(made.slice(0, 0, 2));
      cut.add_(made);
      const std::vector<at::Tensor> both{cut, made};
      at::_foreach_add_(both, 1);
    }
    require(plain.equal(torch::tensor({1.f, 2.f, 1.f, 2.f})), "test", "the plain tensor differs");
    require(full_tensor(cut).equal(torch::tensor({2.f, 3.f, 4.f, 5.f})), "test", "the DTensor differs");
    materialize(made);
    require(full_tensor(made).equal(torch::tensor({2.f, 3.f, 4.f, 5.f})), "test", "what was deferred differs");
  }));
}

TEST_CASE("deferred init: what was recorded goes with what it was recorded for", "[deferred]") {
  const auto mesh = init_device_mesh(torch::kCPU, {1});
  at::Tensor made;
  {
    DeferredInit deferred(mesh);
    made = torch::empty({4});
  }
  const std::weak_ptr<void> tape = as_dtensor(made)->deferred().owner();
  REQUIRE(!tape.expired());
  materialize(made);
  REQUIRE(tape.expired());
}

TEST_CASE("deferred init: a part of a model", "[deferred]") {
  torch::manual_seed(2);
  nn::Linear first(30, 40), second(40, 60);
  {
    torch::NoGradGuard no_grad;
    first->bias.copy_(second->weight[0]);
    second->weight.mul_(2);
  }
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    torch::manual_seed(2);
    nn::Linear a{nullptr}, b{nullptr};
    {
      DeferredInit deferred(mesh);
      a = nn::Linear(30, 40), b = nn::Linear(40, 60);
      torch::NoGradGuard no_grad;
      a->bias.copy_(b->weight[0]);
      b->weight.mul_(2);
    }
    materialize(*b);
    require(is_deferred(a->weight) && is_deferred(a->bias), "test", "more than asked for");
    const auto same = [](const at::Tensor& got, const at::Tensor& want) { return full_tensor(got.detach()).equal(want.detach()); };
    require(same(b->weight, second->weight) && same(b->bias, second->bias), "test", "the second differs");
    {
      torch::NoGradGuard no_grad;
      b->weight.zero_();  // is no longer what the first was made of
    }
    parallelize_module(*a, mesh, {{"*", {{mesh.names()[0], shard(0)}}}});
    materialize(*a);
    require(same(a->weight, first->weight) && same(a->bias, first->bias), "test", "the first differs");
  }));
}

TEST_CASE("deferred init: training goes on as after construction", "[deferred]") {
  const auto train = [](nn::Linear model, const at::Tensor& x) {
    torch::optim::Adam optimizer(model->parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      torch::dropout(model(x), 0.2, true).pow(2).sum().backward();
      optimizer.step();
    }
    return full_tensor(model->weight.detach());
  };
  const auto x = torch::arange(24, torch::kDouble).reshape({4, 6}) / 24;
  const auto made = [] {
    nn::Linear model(6, 8);
    model->to(torch::kDouble);
    return model;
  };
  torch::manual_seed(5);
  const auto expected = train(made(), x);
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    torch::manual_seed(5);
    nn::Linear model{nullptr};
    {
      DeferredInit deferred(mesh);
      model = made();
    }
    parallelize_module(*model, mesh, {{"weight", {{mesh.names()[0], shard(0)}}}});
    materialize(*model);
    Spmd spmd(mesh);
    require(train(model, x).allclose(expected, 1e-12, 1e-12), "test", "differs");
  }));
}

TEST_CASE("deferred init: gradients of a backward in the region", "[deferred]") {
  torch::manual_seed(8);
  nn::Linear plain(6, 8);
  plain(torch::ones({4, 6})).pow(2).sum().backward();
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    torch::manual_seed(8);
    nn::Linear model{nullptr};
    {
      DeferredInit deferred(mesh);
      model = nn::Linear(6, 8);
      model(torch::ones({4, 6})).pow(2).sum().backward();
    }
    parallelize_module(*model, mesh, {{"weight", {{mesh.names()[0], shard(0)}}}});
    materialize(*model);
    for (const auto& name : {"weight", "bias"}) {
      const auto got = model->named_parameters()[name], want = plain->named_parameters()[name];
      require(!is_deferred(got.grad()), "test", "the gradient of {} is deferred", name);
      require(DTensor(got.grad()).placements() == DTensor(got).placements(), "test", "the gradient of {} lies otherwise", name);
      require(full_tensor(got.grad()).equal(want.grad()), "test", "the gradient of {} differs", name);
    }
    torch::optim::SGD(model->parameters(), 0.1).step();
  }));
}

TEST_CASE("deferred init: refused with a hint", "[deferred]") {
  Alone rank(2);
  set_generator_check(GeneratorCheck::off);  // nobody would answer
  const auto mesh = init_device_mesh(torch::kCPU, {2});
  nn::Linear model{nullptr};
  {
    DeferredInit deferred(mesh);
    REQUIRE(DeferredInit::active());
    model = nn::Linear(3, 4);
    CHECK_THROWS_WITH(model->weight.detach().matmul(torch::ones({4})), says("size mismatch") || says("shape"));
    CHECK_THROWS_WITH(torch::zeros({3, 4}).add_(torch::ones({5})), says("must match"));
    CHECK_THROWS_WITH(torch::zeros({3}).normal_(0, -1), says("std"));
    const auto own = rank_local_random();
    CHECK_THROWS_WITH(model->weight.detach().normal_(), says("replicated"));
    CHECK_THROWS_WITH(std::ostringstream() << model->weight, says("dt::materialize"));
  }
  REQUIRE(!DeferredInit::active());
  const auto hint = says("dt::materialize");
  CHECK_THROWS_WITH(model->forward(torch::ones({2, 3})), hint);
  CHECK_THROWS_WITH(model->weight.detach().mul_(2), hint);
  CHECK_THROWS_WITH(DTensor(model->weight).to_local(), hint);
  CHECK_THROWS_WITH(DTensor(model->weight).full_tensor(), hint);
  CHECK_THROWS_WITH(DTensor(model->weight).redistribute({shard(0)}), hint);
  CHECK_THROWS_WITH(model->weight.data_ptr(), hint);
  CHECK_THROWS_WITH(model->weight.data_ptr<float>(), hint);
  CHECK_THROWS_WITH((model->weight.accessor<float, 2>()), hint);
  CHECK_THROWS_WITH(std::ostringstream() << model->weight, hint);
  std::ostringstream file;
  CHECK_THROWS_WITH(torch::save(model, file), hint);
  CHECK_THROWS_WITH(torch::save(model->weight, file), hint);
  REQUIRE(DTensor(model->weight).layout().str() == "f32[4, 3] (R) on (dim0=2), deferred");
  materialize(*model);
  CHECK(model->weight.data_ptr() == DTensor(model->weight).to_local().data_ptr());
  CHECK_NOTHROW(torch::save(model, file));
  set_generator_check(GeneratorCheck::first);
}

TEST_CASE("deferred init: parts of a complex tensor", "[deferred]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto rows = distribute_tensor(torch::ones({4, 4}), mesh, {shard(0)}).tensor(), row = rows.select(0, 1);  // a copied view
    at::Tensor part;
    {
      DeferredInit deferred(mesh);
      part = at::imag(torch::complex(torch::ones({3}), torch::full({3}, 2.F)));
    }
    materialize({part});
    require(full_tensor(part).equal(torch::full({3}, 2.F)), "test", "differs");
  }));
}
