// Gradients that there are not on one device are not there in a pipeline either; and stages that draw now more, now fewer random numbers.
#include "tests/support/pipelined_model.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

using Tensors = std::vector<at::Tensor>;

// Four pieces, of which some give what no later one needs a gradient of.
struct Parts : torch::nn::Module {
  Parts() {
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(6, 6));
    register_module("layers", layers);
  }
  at::Tensor layer(int i, const at::Tensor& x) { return layers[i]->as<torch::nn::Linear>()->forward(x); }
  torch::nn::ModuleList layers;
};

// "detached": the third piece reads x.detach(). "scalar": an output of one element that nobody uses. "infinite": one that nobody uses and
// whose gradient would be 0 times infinity. "half": one of two values has a gradient.
std::vector<Piece> pieces_of(Parts& model, const std::string& kind) {
  const auto give = [&model, kind](int i) {
    return [&model, kind, i](const Tensors& x) -> Tensors {
      const auto y = model.layer(i, x[0]);
      if (kind == "scalar") return {y, y.sum()};
      if (kind == "infinite") return {y, (y * 0).abs().sqrt()};
      if (kind == "half") return {y, x.size() > 1 ? x[1] + y : y * 3};
      return {y};
    };
  };
  const auto third = [&model, kind](const Tensors& x) -> Tensors { return {model.layer(2, kind == "detached" ? x[0].detach() : x[0])}; };
  const auto fourth = [&model](const at::Tensor& x) { return model.layer(3, x); };
  return {piece("layers.0", give(0)), piece("layers.1", give(1)), piece("layers.2", third), piece("layers.3", fourth)};
}

at::Tensor square_loss(const at::Tensor& y, const at::Tensor& target) { return (y - target).square().mean(); }

// Gradients, undefined where there are none, after two steps.
Tensors on_one_device(const std::string& kind, const at::Tensor& batch) {
  torch::manual_seed(2);
  Parts model;
  const auto pieces = pieces_of(model, kind);
  for (int step = 0; step < 2; ++step) {
    for (const auto& rows : batch.tensor_split(4)) {
      Tensors x{rows};
      for (const auto& piece : pieces) x = piece.forward(x);
      square_loss(x[0], rows).backward();
    }
  }
  Tensors gradients;
  for (const auto& parameter : model.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

void check_gradients(int ranks, const std::string& kind, const std::string& schedule, const at::Tensor& batch, const Tensors& expected) {
  const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"pp"});
  const Spmd spmd(stage_mesh(mesh));
  torch::manual_seed(2);
  Parts model;
  auto pipe = pipeline(model, mesh, pieces_of(model, kind), {.schedule = schedule, .microbatches = 4});
  for (int step = 0; step < 2; ++step) pipe.step(batch, batch, square_loss);
  const auto names = model.named_parameters().keys();
  for (const auto& [name, parameter] : pipe.named_parameters()) {
    const auto& wanted = expected[std::ranges::find(names, name) - names.begin()];
    require(parameter.grad().defined() == wanted.defined(), "test", "'{}' has a gradient, or lacks it", name);
    require(!wanted.defined() || full_tensor(parameter.grad()).equal(wanted), "test", "the gradient of '{}' differs", name);
  }
}

}  // namespace

TEST_CASE("pipeline gradients: none where one device has none", "[pipeline]") {
  const auto batch = fractions({8, 6});
  for (const std::string kind : {"detached", "scalar", "infinite", "half"}) {
    const auto expected = on_one_device(kind, batch);
    CHECK(expected[0].defined() == (kind != "detached"));
    for (const std::string transport : {"threads", "shm", "gloo"}) {
      for (const auto& [ranks, schedule] : std::vector<std::pair<int, std::string>>{{2, "1f1b"}, {4, "1f1b"}, {4, "zb1p"}, {2, "zbv"}}) {
        CAPTURE(kind, transport, ranks, schedule);
        const auto run = [&, ranks = ranks, schedule = schedule](World&) { check_gradients(ranks, kind, schedule, batch, expected); };
        CHECK_NOTHROW(on_ranks(ranks, run, transport));
      }
    }
  }
}

TEST_CASE("pipeline gradients: one that comes for some microbatches only", "[pipeline][errors]") {
  const auto run = [](bool first) {
    on_ranks(2, [&](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
      const Spmd spmd(stage_mesh(mesh));
      torch::manual_seed(2);
      Parts model;
      auto pieces = pieces_of(model, "");
      pieces[2].forward = [&, calls = 0](const Tensors& x) mutable -> Tensors {
        return {model.layer(2, (++calls == 1) == first ? x[0] : x[0].detach())};
      };
      auto pipe = pipeline(model, mesh, pieces, {.microbatches = 4});
      const auto batch = fractions({8, 6});
      pipe.step(batch, batch, square_loss);
    });
  };
  CHECK_NOTHROW(run(true));
  CHECK_THROWS_WITH(run(false), says("stage 1 has a gradient for stage 0 where it had none"));
}

TEST_CASE("pipeline gradients: a stage that draws as many numbers as its values say is refused", "[pipeline][errors]") {
  for (const std::string transport : {"threads", "shm"}) {
    for (const std::string schedule : {"gpipe", "1f1b", "zbv"}) {
      CAPTURE(transport, schedule);
      const auto run = [&](World&) {
        const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
        const Spmd spmd(stage_mesh(mesh));
        torch::manual_seed(2);
        Parts model;
        auto pieces = pieces_of(model, "");
        pieces[1].forward = [&](const Tensors& x) -> Tensors {
          const auto y = model.layer(1, x[0]);
          const bool more = full_tensor(x[0].detach()).abs().sum().item<double>() > 100;
          return {more ? torch::dropout(torch::dropout(y, 0.5, true), 0.5, true) : torch::dropout(y, 0.5, true)};
        };
        auto pipe = pipeline(model, mesh, pieces, {.schedule = schedule, .microbatches = 4});
        auto batch = fractions({8, 6}).clone();
        pipe.step(batch, batch, square_loss);
        batch.narrow(0, 4, 2).fill_(1e6);
        try {
          pipe.step(batch, batch, square_loss);
        } catch (const Error& error) {
          const std::string text = error.what();
          require(text.find(" for an earlier microbatch of equal inputs") != text.npos, "test", "it threw {}", text);
          return;
        }
        fail("test", "it did not throw");
      };
      CHECK_NOTHROW(on_ranks(2, run, transport));
    }
  }
}
