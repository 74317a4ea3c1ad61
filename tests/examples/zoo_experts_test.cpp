// The zoo's models of experts train on meshes with the losses, gradients, parameters and biases of one device.
#include "tests/support/core_support.hpp"

#include "examples/zoo/llama3.hpp"
#include "examples/zoo/zoo.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>
#include <dtensor/nn/upcycle.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/pipeline.hpp>

#include <optional>

namespace dtensor::test::zoo_experts {

namespace {

constexpr int64_t kBatch = 8, kLength = 8, kSteps = 2, kMicrobatches = 2;

struct Result {
  std::vector<double> losses;
  std::vector<at::Tensor> gradients, parameters, biases;  // gradients of the first step
};

struct Way {
  std::string name;
  std::vector<std::pair<std::string, int64_t>> mesh;
  std::string fully_sharded_over = "";
  bool cuts_positions = false;  // over tp
};

bool has(const DeviceMesh& mesh, const std::string& dim) { return std::ranges::count(mesh.names(), dim) > 0; }

at::Tensor ids_of(int64_t step, int64_t part) {
  const NoSpmd plain;
  torch::manual_seed(100 + step * kMicrobatches + part);
  return torch::randint(256, {kBatch / kMicrobatches, kLength + 1}, torch::kLong);
}

std::shared_ptr<zoo::Model> made(const std::string& name) {
  torch::manual_seed(1);
  auto model = zoo::find(name).make();
  model->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.mul_(parameter.dim() > 1 ? 8 : 1);  // so that routers choose firmly
  nn::set_loss_scale(*model, 1.0 / kMicrobatches);
  return model;
}

// A step of microbatches; returns its loss.
using Step = std::function<double(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& targets)>;
using Place = std::function<at::Tensor(const at::Tensor&)>;
using Whole = std::function<std::vector<at::Tensor>(const std::function<at::Tensor(const at::Tensor&)>&)>;

Result train(zoo::Model& model, const std::vector<at::Tensor>& parameters, const Place& place, const Step& run, const Whole& whole) {
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
  Result result;
  for (int64_t step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> inputs, targets;
    for (int64_t part = 0; part < kMicrobatches; ++part) {
      const auto ids = ids_of(step, part);
      inputs.push_back(place(ids.slice(1, 0, kLength))), targets.push_back(place(ids.slice(1, 1)));
    }
    optimizer.zero_grad();
    result.losses.push_back(run(inputs, targets));
    if (step == 0) result.gradients = whole([](const at::Tensor& p) { return p.grad().clone(); });
    optimizer.step();
    nn::update_balance(model);
  }
  result.parameters = whole([](const at::Tensor& p) { return p.detach().clone(); });
  nn::for_each_moe(model, [&](nn::MoEImpl& layer) {
    if (layer.bias.defined()) result.biases.push_back(full_tensor(layer.bias).clone());
  });
  return result;
}

double loss_of(zoo::Model& model, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& targets) {
  double sum = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto loss = zoo::loss(model.forward(inputs[i]), targets[i]) / kMicrobatches;
    loss.backward();
    sum += loss.item<double>();
  }
  return sum;
}

Result on_one_device(const std::string& name) {
  const auto model = made(name);
  return train(
      *model, model->parameters(), [](const at::Tensor& x) { return x; },
      [&](const auto& inputs, const auto& targets) { return loss_of(*model, inputs, targets); },
      [&](const auto& of) {
        std::vector<at::Tensor> all;
        for (const auto& p : model->parameters()) all.push_back(of(p));
        return all;
      });
}

void lay_out(zoo::Model& model, const DeviceMesh& mesh) {
  const std::string tp = has(mesh, "tp") ? "tp" : "";
  if (!tp.empty()) parallelize_module(model, mesh, automatic_plan(model));
  expert_parallel(model, mesh, {.dims = has(mesh, "ep") ? std::vector<std::string>{"ep"} : std::vector<std::string>{}, .hidden = tp});
}

Result in_a_pipeline(const std::string& name, const DeviceMesh& mesh) {
  const auto own = stage_mesh(mesh);
  const Spmd spmd(own);
  const auto model = made(name);
  lay_out(*model, own);
  auto pipe = pipeline(*model, mesh, model->pieces(), {.schedule = "1f1b", .microbatches = kMicrobatches});
  pipe.materialize();
  const Place place = [&](const at::Tensor& x) { return distribute_tensor(x, own, Placements(own.ndim(), shard(0))); };
  const auto loss = [](const at::Tensor& y, const at::Tensor& target) { return zoo::loss(y, target) / kMicrobatches; };
  return train(
      *model, pipe.parameters(), place, [&](const auto& inputs, const auto& targets) { return pipe.step(inputs, targets, loss).loss; },
      [&](const auto& of) { return pipe.gather(of); });
}

Result on(const DeviceMesh& mesh, const std::string& name, const Way& way) {
  const Spmd spmd(mesh);
  std::optional<ContextParallel> context;
  if (has(mesh, "cp")) context.emplace(mesh, "cp", ContextParallelOptions{.method = "ring", .order = "zigzag"});
  const auto model = made(name);
  lay_out(*model, mesh);
  if (!way.fully_sharded_over.empty()) fully_shard(*model, mesh[way.fully_sharded_over]);
  Placements placements;
  for (const auto& dim : mesh.names()) {
    const bool cut = dim == "cp" || (dim == "tp" && way.cuts_positions);
    placements.push_back(dim == "dp" || dim == "ep" ? shard(0) : cut ? shard(1) : replicate());
  }
  const Place place = [&](const at::Tensor& x) { return distribute_tensor(context ? context->order(x) : x, mesh, placements); };
  return train(
      *model, model->parameters(), place, [&](const auto& inputs, const auto& targets) { return loss_of(*model, inputs, targets); },
      [&](const auto& of) {
        std::vector<at::Tensor> all;
        for (const auto& p : model->parameters()) all.push_back(full_tensor(of(p)));
        return all;
      });
}

void check(const Result& got, const Result& expected, const std::string& what) {
  const auto near = [&](const at::Tensor& a, const at::Tensor& b, const std::string& kind, double scale) {
    const auto off = (a - b).abs().max().item<double>();
    require(off <= 1e-12 * scale, "test", "{}: {} differs by {:.2e} of {:.2e}", what, kind, off, scale);
  };
  for (size_t i = 0; i < expected.losses.size(); ++i)
    require(std::abs(got.losses.at(i) / expected.losses[i] - 1) <= 1e-12, "test", "{}: loss {} is {}, expected {}", what, i, got.losses[i],
            expected.losses[i]);
  double largest = 0;
  for (const auto& g : expected.gradients) largest = std::max(largest, g.abs().max().item<double>());
  require(got.gradients.size() == expected.gradients.size(), "test", "{}: {} gradients", what, got.gradients.size());
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    near(got.gradients[i], expected.gradients[i], fmt::format("gradient {}", i), largest);
    near(got.parameters[i], expected.parameters[i], fmt::format("parameter {}", i), 1);
  }
  size_t moved = 0;
  for (size_t i = 0; i < expected.biases.size(); ++i) {
    if (got.biases.at(i).count_nonzero().item<int64_t>() == 0) continue;  // of another stage
    near(got.biases[i], expected.biases[i], "bias", 1);
    ++moved;
  }
  require(moved >= expected.biases.size() / (what.starts_with("pp") ? 2 : 1), "test", "{}: {} biases moved", what, moved);
}

}  // namespace

TEST_CASE("zoo experts: models train on any mesh with the numbers of one device", "[zoo][experts]") {
  const std::vector<Way> ways{{"dp x ep", {{"dp", 2}, {"ep", 2}}}, {"dp x ep and fully sharded", {{"dp", 2}, {"ep", 2}}, "dp"},
                              {"ep x tp", {{"ep", 2}, {"tp", 2}}}, {"ep x tp of cut positions", {{"ep", 2}, {"tp", 2}}, "", true},
                              {"cp x ep", {{"cp", 2}, {"ep", 2}}}, {"pp x ep", {{"pp", 2}, {"ep", 2}}}};
  for (const std::string name : {"qwen3-moe-debug", "deepseek-debug"}) {
    const auto expected = on_one_device(name);
    for (const auto& way : ways) {
      for (const std::string transport : {"threads", "shm"}) {
        if (transport == "shm" && way.fully_sharded_over.empty() && !way.cuts_positions) continue;
        CAPTURE(name, way.name, transport);
        CHECK_NOTHROW(on_ranks(
            4,
            [&](World&) {
              std::vector<int64_t> sizes;
              std::vector<std::string> names;
              for (const auto& [dim, size] : way.mesh) sizes.push_back(size), names.push_back(dim);
              const auto mesh = init_device_mesh(torch::kCPU, sizes, names);
              check(has(mesh, "pp") ? in_a_pipeline(name, mesh) : on(mesh, name, way), expected, way.name);
            },
            transport));
      }
    }
  }
}

namespace {

zoo::Llama3Options sizes_of(int64_t experts) {
  zoo::Llama3Options o{256, 2, 32, 4, 2, 48, 1e-5, false, {10000, {}}};
  o.experts = experts;
  return o;
}

at::Tensor scores_of(zoo::Model& model, const at::Tensor& ids) {
  const torch::NoGradGuard no_grad;
  return full_tensor(model.forward(ids));
}

std::shared_ptr<zoo::Llama3Impl> llama_of(const zoo::Llama3Options& options) {
  auto model = std::make_shared<zoo::Llama3Impl>(options);
  model->to(torch::kDouble);
  return model;
}

}  // namespace

TEST_CASE("zoo experts: a model that was made of a dense one computes what that does", "[zoo][experts]") {
  const auto ids = torch::arange(48).view({4, 12});
  torch::manual_seed(2);
  const auto dense = llama_of(sizes_of(0));
  const auto expected = scores_of(*dense, ids);
  {
    const auto sparse = llama_of(sizes_of(4));
    const auto router = sparse->named_parameters()["layers.0.feed_forward.gate.weight"].clone();
    CHECK(!scores_of(*sparse, ids).allclose(expected, 1e-3, 1e-3));
    nn::upcycle(*sparse, *dense);
    CHECK(scores_of(*sparse, ids).allclose(expected, 1e-12, 1e-12));
    CHECK(sparse->named_parameters()["layers.0.feed_forward.gate.weight"].equal(router));
    // The weight of a copy has the gradients of the tokens that chose it: together they are the dense one's.
    zoo::loss(sparse->forward(ids), ids).backward();
    zoo::loss(dense->forward(ids), ids).backward();
    const auto of_dense = dense->named_parameters()["layers.1.feed_forward.w2.weight"].grad();
    CHECK(sparse->named_parameters()["layers.1.feed_forward.experts.w2"].grad().sum(0).allclose(of_dense, 1e-12, 1e-12));
  }
  for (const std::string transport : {"threads", "shm"}) {
    CHECK_NOTHROW(on_ranks(
        4,
        [&](World&) {
          const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"ep", "tp"});
          const Spmd spmd(mesh);
          const auto sparse = llama_of(sizes_of(4)), cut = llama_of(sizes_of(0));
          lay_out(*sparse, mesh);
          parallelize_module(*cut, mesh, automatic_plan(*cut));
          for (const torch::nn::Module* from : {static_cast<torch::nn::Module*>(dense.get()), static_cast<torch::nn::Module*>(cut.get())}) {
            const auto wanted = from == cut.get() ? scores_of(*cut, distribute_tensor(ids, mesh, {replicate(), replicate()})) : expected;
            nn::upcycle(*sparse, *from);
            const auto got = scores_of(*sparse, distribute_tensor(ids, mesh, {shard(0), replicate()}));
            require(got.allclose(wanted, 1e-12, 1e-12), "test", "another function");
          }
        },
        transport));
  }
  auto wider = sizes_of(4);
  wider.hidden = 64;
  const auto other = llama_of(wider);
  CHECK_THROWS_WITH(nn::upcycle(*other, *dense),
                    says("'layers.0.feed_forward.w1.weight' is [48, 32], and the model of experts wants [64, 32]"));
  const auto shared = zoo::find("deepseek-debug").make();
  CHECK_THROWS_WITH(nn::upcycle(*shared, *dense), says("layers.1.feed_forward.shared_experts would be added to the copies"));
}

}  // namespace dtensor::test::zoo_experts
