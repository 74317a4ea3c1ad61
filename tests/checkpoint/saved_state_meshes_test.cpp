// What was saved on one mesh, loaded on meshes of other sizes and orders, with other plans and ZeRO levels, and in pipelines.
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/checkpoint/read.hpp>
#include <dtensor/parallel/fully_shard.hpp>
#include <dtensor/pipeline.hpp>

#include <cmath>
#include <optional>

namespace dt = dtensor;
using namespace dt::test;

namespace {

constexpr int64_t kTokens = 50, kFeatures = 64, kHidden = 254, kDeep = 12, kSavedSteps = 2;

struct DeepBlock : torch::nn::Module {
  DeepBlock()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kFeatures})))),
        up(register_module("up", torch::nn::Linear(kFeatures, kHidden))),
        down(register_module("down", torch::nn::Linear(kHidden, kFeatures))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};

struct Deep : torch::nn::Module {
  Deep() : words(register_module("words", torch::nn::Embedding(kTokens, kFeatures))) {
    for (int64_t i = 0; i < kDeep; ++i) blocks->push_back(std::make_shared<DeepBlock>());
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(kFeatures, kTokens));
  }
  std::vector<dt::Piece> pieces() {
    std::vector<dt::Piece> all{dt::piece("words", [this](const at::Tensor& ids) { return words(ids); })};
    for (size_t i = 0; i < blocks->size(); ++i) {
      const auto run = [this, i](const at::Tensor& x) { return blocks->ptr<DeepBlock>(i)->forward(x); };
      all.push_back(dt::piece(fmt::format("blocks.{}", i), run));
    }
    all.push_back(dt::piece("head", [this](const at::Tensor& x) { return head(x); }));
    return all;
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = words(ids);
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->ptr<DeepBlock>(i)->forward(x);
    return head(x);
  }
  torch::nn::Embedding words;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};

at::Tensor deep_loss(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, kTokens}), targets.reshape({-1}));
}

// A mesh, what lies how on it, and the ZeRO level; 0: parameters are not sharded over dp.
struct Setup {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
  int zero = 0;
  bool other_plan = false;

  bool has(const std::string& name) const { return std::ranges::find(names, name) != names.end(); }
  int ranks() const { return static_cast<int>(c10::multiply_integers(sizes)); }
  std::string str() const {
    std::string text;
    for (size_t i = 0; i < sizes.size(); ++i) text += fmt::format("{}={} ", names[i], sizes[i]);
    return text + fmt::format("ZeRO-{}{}", zero, other_plan ? ", another plan" : "");
  }
  dt::Plan plan() const {
    if (!has("tp")) return {};
    if (other_plan) return {{"words.weight|head.weight", {{"tp", dt::shard(0)}}}, {"blocks.*.down.*", {{"tp", dt::shard(0)}}}};
    return {{"words.weight", {{"tp", dt::shard(1)}}},
            {"blocks.*.up.*", {{"tp", dt::shard(0)}}},
            {"blocks.*.down.weight", {{"tp", dt::shard(1)}}}};
  }
};

// A model in training on such a mesh, or in a pipeline over its dimension pp.
class DeepTraining {
 public:
  DeepTraining(const Setup& setup, uint64_t seed) {
    const dt::DeviceMesh mesh = dt::init_device_mesh(at::kCPU, setup.sizes, setup.names);
    own_.emplace(setup.has("pp") ? dt::stage_mesh(mesh) : mesh);
    spmd_.emplace(*own_);
    torch::manual_seed(seed);
    {
      const dt::DeferredInit deferred(*own_);
      model_ = std::make_shared<Deep>();
      model_->to(at::kDouble);
    }
    if (!setup.plan().empty()) dt::parallelize_module(*model_, *own_, setup.plan());
    if (setup.has("pp")) pipe_.emplace(dt::pipeline(*model_, mesh, model_->pieces(), {.schedule = "1f1b", .microbatches = 4}));
    if (setup.zero > 0) shard(setup);
    if (pipe_) pipe_->materialize();
    else dt::materialize(*model_);
    optimizer_ = std::make_unique<torch::optim::AdamW>(parameters(), torch::optim::AdamWOptions(1e-2));
  }

  double step(int64_t number) {
    optimizer_->zero_grad();
    const auto words = torch::arange(8 * 7).mul(7 + number).add(number).remainder(kTokens).view({8, 7});
    const auto ids = words.narrow(1, 0, 6), targets = words.narrow(1, 1, 6);
    double sum = 0;
    if (pipe_) {
      sum = pipe_->step(ids, targets, [](const at::Tensor& y, const at::Tensor& t) { return deep_loss(y, t) / 4; }).loss;
    } else {
      const auto loss = deep_loss(model_->forward(ids), targets);
      loss.backward();
      sum = loss.item<double>();
    }
    optimizer_->step();
    return sum;
  }

  dt::State state() {
    dt::State state{{"optimizer", *optimizer_}};
    return pipe_ ? state.add({"model", *pipe_}) : state.add({"model", *model_});
  }

 private:
  std::vector<at::Tensor> parameters() const { return pipe_ ? pipe_->parameters() : model_->parameters(); }
  void shard(const Setup& setup) const {
    dt::FullyShardOptions options;
    options.reshard_after_forward = setup.zero == 3;
    options.reduce_at_read = setup.zero == 1;
    const auto& mesh = *own_;
    const auto dims = setup.has("replicas") ? mesh[{"replicas", "dp"}] : mesh["dp"];
    if (!pipe_) {
      dt::fully_shard(*model_, dims, options);
      return;
    }
    for (auto* module : pipe_->modules()) dt::fully_shard(*module, dims, options);
  }

  std::optional<dt::DeviceMesh> own_;
  std::optional<dt::Spmd> spmd_;
  std::shared_ptr<Deep> model_;
  std::optional<dt::Pipeline> pipe_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

// That two steps have the same names, bits and values.
void check_same_steps(const dt::checkpoints::Index& got, const dt::checkpoints::Index& expected) {
  REQUIRE(got.tensors.size() == expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) {
    INFO(name);
    REQUIRE(got.find(name));
    const auto a = dt::checkpoints::read_tensor(got, name), b = dt::checkpoints::read_tensor(expected, name);
    REQUIRE((a.scalar_type() == b.scalar_type() && a.equal(b)));
  }
  CHECK((got.values == expected.values));
}

const std::vector<Setup> kSavedOn{{{2, 2}, {"dp", "tp"}, 3}, {{2, 2}, {"pp", "tp"}}};
const std::vector<Setup> kLoadedOn{{{1}, {"dp"}},
                                   {{2}, {"dp"}, 3},
                                   {{3}, {"tp"}, 0, true},
                                   {{2, 2}, {"tp", "dp"}, 2},
                                   {{6}, {"dp"}, 3},
                                   {{3, 2}, {"dp", "tp"}, 1},
                                   {{3, 2}, {"tp", "dp"}, 3, true},
                                   {{3, 2}, {"pp", "dp"}, 2},
                                   {{8}, {"dp"}, 1},
                                   {{2, 4}, {"dp", "tp"}, 3, true},
                                   {{2, 2, 2}, {"replicas", "dp", "tp"}, 3},
                                   {{4, 2}, {"tp", "dp"}, 2},
                                   {{2, 2, 2}, {"pp", "dp", "tp"}, 3},
                                   {{4, 2}, {"pp", "tp"}, 0, true}};

}  // namespace

TEST_CASE("checkpoint: what was saved on four ranks is loaded on one to eight in other layouts", "[checkpoint]") {
  for (const auto& from : kSavedOn) {
    const Folder folder;
    double next_loss = 0;
    REQUIRE_NOTHROW(on_ranks(from.ranks(), [&](dt::World& world) {
      DeepTraining training(from, 1);
      for (int64_t step = 0; step < kSavedSteps; ++step) training.step(step);
      dt::save(training.state(), folder / "saved", kSavedSteps);
      const auto loss = training.step(kSavedSteps);
      if (world.rank() == 0) next_loss = loss;
    }));
    const auto saved = dt::checkpoints::read_index(dt::step_folder(folder / "saved", kSavedSteps));
    for (const auto* transport : {"threads", "shm"}) {
      for (const auto& to : kLoadedOn) {
        CAPTURE(from.str(), to.str(), transport);
        const auto again = folder / fmt::format("{}-{}", transport, &to - kLoadedOn.data());
        std::atomic<int64_t> read = 0;
        REQUIRE_NOTHROW(on_ranks(
            to.ranks(),
            [&](dt::World&) {
              DeepTraining training(to, 2);
              training.step(5);
              dt::load(training.state(), folder / "saved");
              const auto counts = dt::checkpoints::last_load();
              read += counts.bytes_read;
              dt::require(static_cast<double>(counts.bytes_read) <= 1.05 * static_cast<double>(counts.bytes_loaded), "test",
                          "{} bytes are read, of a part of {}", counts.bytes_read, counts.bytes_loaded);
              dt::save(training.state(), again, kSavedSteps);
              const auto loss = training.step(kSavedSteps);
              dt::require(std::abs(loss - next_loss) < 1e-9, "test", "the next loss is {}; expected {}", loss, next_loss);
            },
            transport));
        CHECK(read == saved.bytes());  // each byte once
        check_same_steps(dt::checkpoints::read_index(dt::step_folder(again, kSavedSteps)), saved);
      }
    }
  }
}
