// Stock torch::nn modules and optimizers under Spmd against the same program on one device.
#include "catch.hpp"

#include <torch/torch.h>

#include <dtensor/checkpoint/torch_files.hpp>
#include <dtensor/dtensor.hpp>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>

namespace dt = dtensor;

namespace {

constexpr int64_t kVocab = 32, kDim = 16, kHeads = 4, kBatch = 4, kSeq = 6;

// Embedding, MultiheadAttention, LayerNorm, Linear, GELU, Dropout: not a word of dtensor.
struct StockModelImpl : torch::nn::Module {
  StockModelImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(kVocab, kDim));
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    attention = register_module("attention", torch::nn::MultiheadAttention(kDim, kHeads));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
    up = register_module("up", torch::nn::Linear(kDim, 4 * kDim));
    down = register_module("down", torch::nn::Linear(4 * kDim, kDim));
    dropout = register_module("dropout", torch::nn::Dropout(0.1));
    head = register_module("head", torch::nn::Linear(kDim, kVocab));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens).transpose(0, 1);  // [seq, batch, dim]
    auto h = norm1(x);
    x = x + std::get<0>(attention(h, h, h));
    x = x + dropout(down(torch::gelu(up(norm2(x)))));
    return head(x.transpose(0, 1));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(StockModel);

torch::Tensor tokens(int step) {
  return (torch::arange(kBatch * (kSeq + 1), torch::kLong) * (step * 7 + 3) % kVocab).reshape({kBatch, kSeq + 1});
}

// Ten steps; `place` lays out the module and each batch.
struct Run {
  std::vector<double> losses, norms;
};

template <class Optimizer, class Options, class PlaceModule, class PlaceBatch>
Run train(torch::Dtype dtype, Options options, PlaceModule place_module, PlaceBatch place_batch, double clip = 0.5) {
  torch::manual_seed(0);
  StockModel model;
  model->to(dtype);
  place_module(*model);
  Optimizer optimizer(model->parameters(), options);
  Run run;
  for (int step = 0; step < 10; ++step) {
    const auto batch = tokens(step);
    auto x = place_batch(batch.slice(1, 0, kSeq).contiguous()), y = place_batch(batch.slice(1, 1, kSeq + 1).contiguous());
    auto loss = torch::nn::functional::cross_entropy(model(x).reshape({-1, kVocab}), y.reshape({-1}));
    optimizer.zero_grad();
    loss.backward();
    run.norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), clip));
    optimizer.step();
    run.losses.push_back(loss.template item<double>());
  }
  return run;
}

const dt::Plan kTensorParallel{
    {"up.*", {{"tp", dt::shard(0)}}},
    {"down.weight", {{"tp", dt::shard(1)}}},
    {"attention.in_proj_*", {{"tp", dt::strided_shard(0, 3)}}},
    {"attention.out_proj.weight", {{"tp", dt::shard(1)}}},
    {"head.*", {{"tp", dt::shard(0)}}},
};

struct Case {
  const char* name;
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
};

dt::Placements batch_placements(const dt::DeviceMesh& mesh) {
  dt::Placements placements;
  for (const auto& name : mesh.names()) {
    placements.push_back(name == "dp" ? dt::shard(0) : name == "sp" ? dt::shard(1) : dt::replicate());
  }
  return placements;
}

template <class Optimizer, class Options>
void compare(const Case& c, Options options) {
  const auto same = [](const torch::Tensor& t) { return t; };
  const auto expected = train<Optimizer>(torch::kDouble, options, [](torch::nn::Module&) {}, same);
  dt::LaunchOptions launch;
  launch.ranks = 1;
  for (const auto size : c.sizes) launch.ranks *= static_cast<int>(size);
  launch.deadline = std::chrono::seconds(60);
  dt::launch(launch, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, c.sizes, c.names);
    dt::Spmd spmd(mesh);
    const auto run = train<Optimizer>(
        torch::kDouble, options,
        [&](torch::nn::Module& module) {
          const auto& names = mesh.names();
          if (std::ranges::find(names, "tp") != names.end()) dt::parallelize_module(module, mesh, kTensorParallel);
        },
        [&](const torch::Tensor& t) { return dt::distribute_tensor(t, mesh, batch_placements(mesh)).tensor(); });
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      const double off = std::abs(run.losses[i] - expected.losses[i]) / std::abs(expected.losses[i]);
      dt::require(off < 1e-12, "test", "{}: step {}: loss {} on the mesh, {} on one device", c.name, i, run.losses[i],
                  expected.losses[i]);
      dt::require(std::abs(run.norms[i] - expected.norms[i]) < 1e-10, "test", "{}: step {}: gradient norm {} and {}", c.name, i,
                  run.norms[i], expected.norms[i]);
    }
  });
}

}  // namespace

TEST_CASE("model: a stock model trains on a mesh as on one device", "[model]") {
  const auto c = GENERATE(Case{"one", {1}, {"dp"}}, Case{"dp=2", {2}, {"dp"}}, Case{"dp=3", {3}, {"dp"}}, Case{"tp=2", {2}, {"tp"}},
                          Case{"tp=4", {4}, {"tp"}}, Case{"sp=2", {2}, {"sp"}}, Case{"dp=2,tp=2", {2, 2}, {"dp", "tp"}},
                          Case{"dp=2,sp=2", {2, 2}, {"dp", "sp"}}, Case{"sp=2,tp=2", {2, 2}, {"sp", "tp"}});
  CAPTURE(c.name);
  REQUIRE_NOTHROW(compare<torch::optim::AdamW>(c, torch::optim::AdamWOptions(1e-2)));
}

TEST_CASE("model: SGD with momentum and Adam", "[model]") {
  const Case c{"dp=2,tp=2", {2, 2}, {"dp", "tp"}};
  REQUIRE_NOTHROW(compare<torch::optim::SGD>(c, torch::optim::SGDOptions(1e-2).momentum(0.9)));
  REQUIRE_NOTHROW(compare<torch::optim::Adam>(c, torch::optim::AdamOptions(1e-2)));
}

namespace {

// A model with buffers and dropout, AdamW and a schedule, which train from one step to another. A step draws from its own seed.
struct Training {
  explicit Training(const std::function<void(torch::nn::Module&)>& lay_out) {
    torch::manual_seed(0);
    net = torch::nn::Sequential(torch::nn::Linear(6, 10), torch::nn::ReLU(), torch::nn::BatchNorm1d(10), torch::nn::Dropout(0.2),
                                torch::nn::Linear(10, 3));
    net->to(torch::kDouble);
    lay_out(*net);
    optimizer.emplace(net->parameters(), torch::optim::AdamWOptions(0.05));
    schedule.emplace(*optimizer, dt::lr::cosine(8));
  }
  void go(int from, int to, const std::function<torch::Tensor(const torch::Tensor&)>& place) {
    for (int step = from; step < to; ++step) {
      const auto x = place(torch::arange(72, torch::kDouble).add(5 * step).mul(3).sin().reshape({12, 6}));
      torch::manual_seed(1000 + static_cast<uint64_t>(step));
      optimizer->zero_grad();
      net->forward(x).square().mean().backward();
      optimizer->step();
      schedule->step();
    }
  }
  torch::nn::Sequential net{nullptr};
  std::optional<torch::optim::AdamW> optimizer;
  std::optional<dt::lr::Scheduler> schedule;
};

// Three files whose names begin alike, gone at the end.
struct Checkpoint {
  std::string path = std::filesystem::temp_directory_path() / ("dtensor_checkpoint_" + std::to_string(getpid()));
  ~Checkpoint() {
    for (const auto* part : {".model", ".optimizer", ".schedule"}) std::filesystem::remove(path + part);
  }
  void save(const Training& t) const {
    dt::save(t.net, path + ".model");
    dt::save(*t.optimizer, path + ".optimizer");
    dt::save(*t.schedule, path + ".schedule");
  }
  void load(Training& t) const {
    dt::load(t.net, path + ".model");
    dt::load(*t.optimizer, path + ".optimizer");
    dt::load(*t.schedule, path + ".schedule");
  }
};

// All that a model holds: parameters, then buffers.
std::vector<torch::Tensor> tensors_of(const torch::nn::Module& model) {
  auto tensors = model.parameters();
  for (const auto& buffer : model.buffers()) tensors.push_back(buffer);
  return tensors;
}

// Trains on a mesh [2, ranks / 2] of dp and tp, in the region, with the batch cut over dp.
void on_dp_and_tp(int ranks, bool shard_fully,
                  const std::function<void(Training&, const std::function<torch::Tensor(torch::Tensor)>&)>& body) {
  dt::LaunchOptions launch;
  launch.ranks = ranks;
  launch.deadline = std::chrono::seconds(60);
  dt::launch(launch, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {2, ranks / 2}, {"dp", "tp"});
    dt::Spmd spmd(mesh);
    Training training([&](torch::nn::Module& net) {
      dt::parallelize_module(net, mesh, dt::tensor_parallel({{"0", dt::ColwiseParallel()}, {"4", dt::RowwiseParallel()}}));
      if (shard_fully) dt::fully_shard(net, mesh["dp"]);
    });
    body(training, [&](const torch::Tensor& x) { return dt::distribute_tensor(x, mesh, {dt::shard(0), dt::replicate()}).tensor(); });
  });
}

}  // namespace

TEST_CASE("model: training goes on from files on another mesh", "[model]") {
  const auto plain = [](const torch::Tensor& x) { return x; };
  Training whole([](torch::nn::Module&) {});
  whole.go(0, 6, plain);
  const auto expected = tensors_of(*whole.net);
  const auto same = [&](const Training& t, const char* what) {
    const auto got = tensors_of(*t.net);
    for (size_t i = 0; i < expected.size(); ++i)
      dt::require(dt::full_tensor(got[i]).allclose(expected[i], 1e-8, 1e-8), "test", "{}: tensor {} differs by {}", what, i,
                  (dt::full_tensor(got[i]) - expected[i]).abs().max().item<double>());
  };

  const Checkpoint first;
  REQUIRE_NOTHROW(on_dp_and_tp(4, true, [&](Training& t, const auto& place) {
    t.go(0, 2, place);
    first.save(t);
    t.go(2, 6, place);
    same(t, "after saving");
  }));
  REQUIRE_NOTHROW(on_dp_and_tp(2, false, [&](Training& t, const auto& place) {
    first.load(t);
    t.go(2, 4, place);
    first.save(t);
    t.go(4, 6, place);
    same(t, "resumed on dp=2");
  }));
  REQUIRE_NOTHROW(on_dp_and_tp(6, true, [&](Training& t, const auto& place) {
    first.load(t);
    t.go(4, 6, place);
    same(t, "resumed on dp=2,tp=3 and fully sharded");
  }));
  Training alone([](torch::nn::Module&) {});
  first.load(alone);
  alone.go(4, 6, plain);
  REQUIRE_NOTHROW(same(alone, "resumed on one device"));
}
