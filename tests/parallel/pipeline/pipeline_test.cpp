// A model that is cut into a pipeline trains with the numbers of one device: losses, norms, parameters after AdamW, and random numbers.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/parallel/pipeline/sequential.hpp>
#include <dtensor/pipeline.hpp>

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kWords = 11, kWidth = 8;

struct Block : torch::nn::Module {
  Block()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, 16))),
        down(register_module("down", torch::nn::Linear(16, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + torch::dropout(down(torch::gelu(up(norm(x)))), 0.25, is_training()); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};

// What reaches over stages: nothing, the embeddings as the head's weights, or also values of the first pieces.
enum class Reach { none, tied, skips };

struct Model : torch::nn::Module {
  explicit Model(int layers, Reach reach = Reach::none) : reach(reach) {
    words = register_module("words", torch::nn::Embedding(kWords, kWidth));
    for (int i = 0; i < layers; ++i) blocks->push_back(std::make_shared<Block>());
    register_module("blocks", blocks);
    if (reach == Reach::none) head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  std::vector<Piece> pieces() {
    const bool skips = reach == Reach::skips;
    std::vector<Piece> all;
    if (skips) {
      all.push_back(piece("words",
                          [this](const at::Tensor& ids) {
                            return std::vector{words(ids), words->weight * 2};
                          },
                          {.gives = {"twice"}}));
    } else {
      all.push_back(piece("words", [this](const at::Tensor& ids) { return words(ids); }));
    }
    for (size_t i = 0; i < blocks->size(); ++i) {
      const auto name = fmt::format("blocks.{}", i);
      const auto run = [this, i](const at::Tensor& x) { return blocks->ptr<Block>(i)->forward(x); };
      if (skips && i == 0) {
        all.push_back(piece(name, [run](const at::Tensor& x) { return std::vector{run(x), x.tanh()}; }, {.gives = {"first"}}));
      } else if (skips && i == 1) {
        const auto add = [run](const std::vector<at::Tensor>& x) { return run(x[0]) * x[1].sum(1).sigmoid().mean(); };
        all.push_back(piece(name, add, {.takes = {"twice"}}));
      } else if (skips && i + 1 == blocks->size()) {
        all.push_back(piece(name, [run](const std::vector<at::Tensor>& x) { return run(x[0] + x[1]); }, {.takes = {"first"}}));
      } else {
        all.push_back(piece(name, run));
      }
    }
    if (skips) {
      const auto scores = [](const std::vector<at::Tensor>& x) { return at::linear(x[0] + x[1], x[2]); };
      all.push_back(piece("", scores, {.takes = {"first", "twice"}}));
    } else if (reach == Reach::tied) {
      all.push_back(piece("words", [this](const at::Tensor& x) { return at::linear(x, words->weight); }));
    } else {
      all.push_back(piece("head", [this](const at::Tensor& x) { return head(x); }));
    }
    return all;
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto all = pieces();
    return pipelining::stages_of(all, {static_cast<int>(all.size())}).forwards[0]({ids})[0];
  }
  Reach reach;
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};

struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> parameters;
  at::Tensor drawn;
};

at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, kWords}), targets.reshape({-1}));
}

constexpr int kSteps = 3;

std::pair<at::Tensor, at::Tensor> batch_of(int step) {
  const auto words = torch::arange(10 * 5).mul(7 + step).add(step).remainder(kWords).view({10, 5});
  return {words.narrow(1, 0, 4), words.narrow(1, 1, 4)};
}

Trained on_one_device(int layers, int microbatches, at::ScalarType dtype, Reach reach = Reach::none) {
  torch::manual_seed(1);
  Model model(layers, reach);
  model.to(dtype);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = batch_of(step);
    const auto x = ids.tensor_split(microbatches), y = targets.tensor_split(microbatches);
    for (int i = 0; i < microbatches; ++i) {
      const auto loss = loss_of(model.forward(x[i]), y[i]) / microbatches;
      loss.backward();
      result.losses.push_back(loss.item<double>());
    }
    result.norms.push_back(clip_grad_norm_(model.parameters(), 0.5));
    optimizer.step();
  }
  for (const auto& item : model.named_parameters()) result.parameters[item.key()] = item.value().detach();
  result.drawn = torch::rand({3});
  return result;
}

Trained on_a_pipeline(const DeviceMesh& mesh, int layers, at::ScalarType dtype, const PipelineOptions& options, Reach reach = Reach::none) {
  const auto own = stage_mesh(mesh);
  torch::manual_seed(1);
  std::shared_ptr<Model> model;
  {
    const DeferredInit deferred(own);
    model = std::make_shared<Model>(layers, reach);
    model->to(dtype);
  }
  auto pipe = pipeline(*model, mesh, model->pieces(), options);
  pipe.materialize();
  torch::optim::AdamW optimizer(pipe.parameters(), torch::optim::AdamWOptions(1e-2));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto [ids, targets] = batch_of(step);
    const auto done =
        pipe.step(ids, targets, [&](const at::Tensor& y, const at::Tensor& t) { return loss_of(y, t) / pipe.microbatches(); });
    result.losses.insert(result.losses.end(), done.losses.begin(), done.losses.end());
    result.norms.push_back(pipe.clip_grad_norm_(0.5));
    optimizer.step();
  }
  for (const auto& [name, parameter] : pipe.named_parameters()) result.parameters[name] = full_tensor(parameter.detach());
  result.drawn = torch::rand({3});
  return result;
}

void check_equal(const Trained& got, const Trained& expected) {
  require(got.losses == expected.losses, "test", "losses differ: {} and {}", fmt::join(got.losses, " "), fmt::join(expected.losses, " "));
  require(got.norms == expected.norms, "test", "norms differ: {} and {}", fmt::join(got.norms, " "), fmt::join(expected.norms, " "));
  require(!got.parameters.empty(), "test", "the rank has no parameters");
  for (const auto& [name, parameter] : got.parameters) require(parameter.equal(expected.parameters.at(name)), "test", "'{}' differs", name);
  require(got.drawn.equal(expected.drawn), "test", "what is drawn afterwards differs");
}

}  // namespace

TEST_CASE("pipelined model: one device's training bit for bit", "[pipeline]") {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const int ranks : {1, 2, 4}) {
      for (const std::string name :
           {"gpipe", "1f1b", "interleaved", "zb1p", "zb2p", "interleaved_zb", "zbv", "v_half", "v_min", "dualpipev"}) {
        CAPTURE(dtype, ranks, name);
        const auto expected = on_one_device(7, 8, dtype);
        REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"pp"});
          check_equal(on_a_pipeline(mesh, 7, dtype, {.schedule = name, .microbatches = 8}), expected);
        }));
      }
    }
  }
}

TEST_CASE("pipelined model: tied embeddings and values that skip stages", "[pipeline]") {
  for (const auto reach : {Reach::tied, Reach::skips}) {
    const auto expected = on_one_device(7, 8, at::kFloat, reach);
    for (const int ranks : {1, 2, 4}) {
      for (const std::string name : {"gpipe", "1f1b", "interleaved", "zb1p", "zbv", "v_min", "dualpipev"}) {
        CAPTURE(static_cast<int>(reach), ranks, name);
        REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"pp"});
          const auto got = on_a_pipeline(mesh, 7, at::kFloat, {.schedule = name, .microbatches = 8}, reach);
          check_equal(got, expected);
        }));
      }
    }
    for (const std::string transport : {"shm", "gloo"}) {
      CAPTURE(static_cast<int>(reach), transport);
      REQUIRE_NOTHROW(on_ranks(
          3,
          [&](World&) {
            check_equal(on_a_pipeline(init_device_mesh(c10::kCPU, {3}, {"pp"}), 7, at::kFloat, {.microbatches = 8}, reach), expected);
          },
          transport));
    }
  }
}

TEST_CASE("pipelined model: tied embeddings beside another mesh dimension", "[pipeline]") {
  const auto expected = on_one_device(3, 4, at::kDouble, Reach::tied);
  for (const std::string name : {"1f1b", "zb1p", "zbv"}) {
    CAPTURE(name);
    REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"pp", "dp"});
      check_equal(on_a_pipeline(mesh, 3, at::kDouble, {.schedule = name, .microbatches = 4}, Reach::tied), expected);
    }));
  }
}

TEST_CASE("pipelined model: a tied parameter belongs to the first stage and is frozen on all", "[pipeline]") {
  const auto program = [&](Model& model, const auto& step, const auto& parameters) {
    model.words->weight.set_requires_grad(false);
    step();
    for (const auto& parameter : parameters) {
      if (parameter.grad().defined()) parameter.data().add_(parameter.grad());
    }
    return step();
  };
  const auto [x, y] = batch_of(0);
  torch::manual_seed(1);
  Model one(2, Reach::tied);
  one.eval();
  const auto expected = program(
      one,
      [&] {
        double sum = 0;
        for (int i = 0; i < 2; ++i) {
          const auto loss = loss_of(one.forward(x.tensor_split(2)[i]), y.tensor_split(2)[i]);
          loss.backward();
          sum += loss.item<double>();
        }
        return sum;
      },
      one.parameters());
  REQUIRE_NOTHROW(on_ranks(2, [&, x = x, y = y](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
    const Spmd spmd(stage_mesh(mesh));
    torch::manual_seed(1);
    Model model(2, Reach::tied);
    model.eval();
    auto pipe = pipeline(model, mesh, model.pieces(), {.microbatches = 2});
    const auto parameters = pipe.named_parameters();
    const bool has_words = std::ranges::any_of(parameters, [](const auto& p) { return p.first == "words.weight"; });
    require(has_words == (world.rank() == 0), "test", "the embeddings are in the parameters of rank {}", world.rank());
    const auto got = program(
        model, [&] { return pipe.step(x, y, loss_of).loss; }, pipe.parameters());
    require(got == expected, "test", "got {}, expected {}", got, expected);
  }));
}

TEST_CASE("pipelined model: the modules of a Sequential are pieces", "[pipeline]") {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Embedding(kWords, kWidth), torch::nn::Linear(kWidth, 12), torch::nn::ReLU(),
                                 torch::nn::Linear(12, kWords));
  };
  const auto [x, y] = batch_of(0);
  torch::manual_seed(1);
  auto one = make();
  const auto expected = loss_of(one->forward(x), y).item<double>();
  REQUIRE_NOTHROW(on_ranks(2, [&, x = x, y = y](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
    const Spmd spmd(stage_mesh(mesh));
    torch::manual_seed(1);
    auto model = make();
    auto pipe = pipeline(*model, mesh, pieces(model), {.microbatches = 1, .cut = {3, 1}});
    require(pipe.evaluate(x, y, loss_of).loss == expected, "test", "the loss differs");
  }));
  CHECK(pieces(make(), "layers")[2].modules == "layers.2");
}

TEST_CASE("pipelined model: a schedule of one's own", "[pipeline]") {
  const auto expected = on_one_device(2, 4, at::kFloat);
  PipelineOptions options{.microbatches = 4};
  options.make_schedule = [](const pipelining::PipelineSize& size) {
    auto schedule = pipelining::gpipe(size);
    std::ranges::swap(schedule.ranks[0][0], schedule.ranks[0][1]);  // microbatch 1 first
    return schedule;
  };
  REQUIRE_NOTHROW(
      on_ranks(2, [&](World&) { check_equal(on_a_pipeline(init_device_mesh(c10::kCPU, {2}, {"pp"}), 2, at::kFloat, options), expected); }));
}

TEST_CASE("pipelined model: on other transports and with microbatches of two lengths", "[pipeline]") {
  const auto expected = on_one_device(3, 4, at::kFloat);  // 10 rows: 3, 3, 2, 2
  for (const std::string transport : {"shm", "gloo"}) {
    for (const std::string name : {"1f1b", "zbv"}) {
      CAPTURE(transport, name);
      REQUIRE_NOTHROW(on_ranks(
          2,
          [&](World&) {
            check_equal(on_a_pipeline(init_device_mesh(c10::kCPU, {2}, {"pp"}), 3, at::kFloat, {.schedule = name, .microbatches = 4}),
                        expected);
          },
          transport));
    }
  }
}

TEST_CASE("pipelined model: beside another mesh dimension", "[pipeline]") {
  const auto expected = on_one_device(3, 4, at::kDouble);
  for (const std::string name : {"1f1b", "zbv"}) {
    REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
      const auto got =
          on_a_pipeline(init_device_mesh(c10::kCPU, {2, 2}, {"pp", "dp"}), 3, at::kDouble, {.schedule = name, .microbatches = 4});
      check_equal(got, expected);  // the batch is whole on both: nothing is summed in another order
    }));
  }
}

TEST_CASE("pipelined model: a model that is switched to eval draws nothing", "[pipeline]") {
  const auto [ids, targets] = batch_of(0);
  const auto x = ids, y = targets;
  const auto program = [&](const auto& step, torch::nn::Module& model) {
    for (const bool training : {true, false, true}) {
      model.train(training);
      step();
    }
    return torch::rand({3});
  };
  torch::manual_seed(1);
  Model one(2);
  const auto expected = program(
      [&] {
        for (int i = 0; i < 2; ++i) one.forward(x.tensor_split(2)[i]);
      },
      one);
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
    const Spmd spmd(stage_mesh(mesh));
    torch::manual_seed(1);
    Model model(2);
    auto pipe = pipeline(model, mesh, model.pieces(), {.microbatches = 2});
    const auto drawn = program([&] { pipe.step(x, y, loss_of); }, model);
    require(full_tensor(drawn).equal(expected), "test", "other random numbers");
  }));
}

TEST_CASE("pipelined model: parameters of other stages take no memory", "[pipeline]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
    std::shared_ptr<Model> model;
    {
      const DeferredInit deferred(stage_mesh(mesh));
      model = std::make_shared<Model>(2);
    }
    auto pipe = pipeline(*model, mesh, model->pieces(), {.cut = {2, 2}});
    pipe.materialize();
    for (const auto& item : model->named_parameters()) {
      const bool first = item.key().rfind("words", 0) == 0 || item.key().rfind("blocks.0", 0) == 0;
      require(is_deferred(item.value()) == (first != (world.rank() == 0)), "test", "'{}' is on the wrong rank", item.key());
    }
    require(pipe.parameters().size() == (world.rank() == 0 ? 7 : 8), "test", "{} parameters", pipe.parameters().size());
  }));
}

TEST_CASE("pipelined model: balanced cuts", "[pipeline]") {
  using pipelining::balanced_cut;
  CHECK(balanced_cut({1, 1, 1, 1}, 2) == std::vector{2, 2});
  CHECK(balanced_cut({1, 1, 1}, 2) == std::vector{1, 2});
  CHECK(balanced_cut({5, 1, 1, 1, 1, 1}, 2) == std::vector{1, 5});
  CHECK(balanced_cut({1, 1, 1, 1, 5}, 3) == std::vector{1, 3, 1});
  CHECK(balanced_cut({0, 0, 0}, 3) == std::vector{1, 1, 1});
  CHECK_THROWS_WITH(balanced_cut({1, 1}, 3), says("got 2 pieces for 3 stages"));
  CHECK_THROWS_WITH(balanced_cut({1, -1}, 1), says("not negative"));
}

TEST_CASE("pipelined model: what it refuses", "[pipeline][errors]") {
  const Alone alone(2);
  const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
  std::shared_ptr<Model> model;
  {
    const DeferredInit deferred(stage_mesh(mesh));
    model = std::make_shared<Model>(2);
  }
  const auto make = [&](std::vector<Piece> pieces, const PipelineOptions& options = {}) {
    pipeline(*model, mesh, std::move(pieces), options);
  };
  auto pieces = model->pieces();
  CHECK_THROWS_WITH(make({pieces[0]}), says("got 1 pieces for 2 stages"));
  CHECK_THROWS_WITH(make({pieces[0], pieces[1], pieces[3]}), says("no piece uses the parameter 'blocks.1.norm.weight'"));
  CHECK_THROWS_WITH(make(pieces, {.schedule = "1f2b"}), says("there is no schedule '1f2b'"));
  CHECK_THROWS_WITH(make(pieces, {.cut = {1, 2}}), says("the cut [1, 2] is of 3 pieces into 2 stages; expected 4 pieces"));
  CHECK_THROWS_WITH(make(pieces, {.costs = {1, 2}}), says("got 2 costs of 4 pieces"));
  CHECK_THROWS_WITH(make(pieces, {.dim = "tp"}), says("tp"));
  auto takes = pieces;
  takes[2].skips.takes = {"x"};
  CHECK_THROWS_WITH(make(takes), says("the piece 'blocks.1' takes 'x', which no piece before it gives"));
  auto gives = pieces;
  gives[0].skips.gives = gives[1].skips.gives = {"x"};
  CHECK_THROWS_WITH(make(gives), says("two pieces give 'x'; expected one"));
  auto wrong = pieces;
  wrong[1].modules = "blokcs.0";
  CHECK_THROWS_WITH(make(wrong),
                    says("the piece 'blokcs.0' matches no module; hint: names are fully qualified; the closest are 'blocks.0'"));
}
