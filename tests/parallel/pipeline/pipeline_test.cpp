// A model that is cut into a pipeline trains with the numbers of one device: losses, norms, parameters after AdamW, and random numbers.
#include "tests/support/pipelined_model.hpp"

#include <dtensor/parallel/pipeline/sequential.hpp>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::test::pipelined;

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

namespace {

// Layers with running statistics and a table that they share, and a scale of the whole model.
struct Buffered : torch::nn::Module {
  struct Layer : torch::nn::Module {
    explicit Layer(const at::Tensor& shared)
        : norm(register_module("norm", torch::nn::BatchNorm1d(kWidth))), table(register_buffer("table", shared)) {}
    torch::nn::BatchNorm1d norm;
    at::Tensor table;
  };
  Buffered() {
    const auto table = torch::rand({kWidth});
    for (int i = 0; i < 3; ++i) layers.push_back(register_module("l" + std::to_string(i), std::make_shared<Layer>(table)));
    scale = register_buffer("scale", torch::rand({}));
    offset = register_buffer("offset", torch::rand({kWidth}));
  }
  at::Tensor layer(size_t i, const at::Tensor& x) { return layers[i]->norm(x * layers[i]->table * scale + (i == 1 ? offset : x)); }
  std::vector<Piece> pieces() {
    std::vector<Piece> all;
    for (size_t i = 0; i < layers.size(); ++i) {
      all.push_back(piece(fmt::format("l{}{}", i, i == 1 ? "|offset" : ""), [this, i](const at::Tensor& x) { return layer(i, x); }));
    }
    return all;
  }
  std::vector<std::shared_ptr<Layer>> layers;
  at::Tensor scale, offset;
};

at::Tensor loss_of_buffered(const at::Tensor& y, const at::Tensor& target) { return (y - target).square().mean(); }

}  // namespace

TEST_CASE("pipelined model: each rank has the buffers of its stages", "[pipeline]") {
  const auto x = torch::arange(12 * kWidth).view({12, kWidth}).to(at::kFloat).sin(), y = x.cos();
  torch::manual_seed(1);
  Buffered one;
  double losses = 0;
  for (int step = 0; step < 2; ++step) {
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
      auto h = x.chunk(4)[i];
      for (size_t l = 0; l < one.layers.size(); ++l) h = one.layer(l, h);
      sum += loss_of_buffered(h, y.chunk(4)[i]).item<double>();
    }
    losses += sum;
  }
  for (const std::string transport : {"threads", "shm"}) {
    for (const std::string schedule : {"1f1b", "zb1p"}) {
      CAPTURE(transport, schedule);
      REQUIRE_NOTHROW(on_ranks(
          2,
          [&](World& world) {
            const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
            torch::manual_seed(1);
            const auto model = [&] {
              const DeferredInit deferred(stage_mesh(mesh));
              return std::make_shared<Buffered>();
            }();
            auto pipe = pipeline(*model, mesh, model->pieces(), {.schedule = schedule, .microbatches = 4, .cut = {1, 2}});
            pipe.materialize();
            double got = 0;
            for (int step = 0; step < 2; ++step) got += pipe.step(x, y, loss_of_buffered).loss;
            require(got == losses, "test", "the losses add up to {}; expected {}", got, losses);
            std::map<std::string, at::Tensor> own;
            for (const auto& [name, buffer] : pipe.named_buffers()) own[name] = full_tensor(buffer);
            require(own.size() == (world.rank() == 0 ? 5 : 10), "test", "rank {} has {} buffers", world.rank(), own.size());
            for (const auto& item : one.named_buffers()) {
              const auto found = own.find(item.key());
              require(found == own.end() || found->second.equal(item.value()), "test", "'{}' differs", item.key());
            }
            const bool first = world.rank() == 0;
            require(own.count("scale") == 1 && own.count("offset") == !first, "test", "the model's own buffers are on the wrong rank");
            require(is_deferred(first ? model->layers[1]->norm->running_mean : model->layers[0]->norm->running_mean), "test",
                    "a buffer of the other rank was made");
          },
          transport));
    }
  }
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
  wrong[1].modules = "blocks.0|blokcs.1";
  CHECK_THROWS_WITH(make(wrong), says("the piece 'blocks.0|blokcs.1' matches no module by 'blokcs.1'; hint"));
}
