// fully_shard of models that are not all alike: tied parameters, parts, other dtypes, padding; and what it refuses.
#include "tests/support/fully_shard_support.hpp"

#include <ATen/autocast_mode.h>
#include <dtensor/base/compat.hpp>
#include <fmt/ranges.h>

#include <cmath>
#include <optional>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::test::sharding;

TEST_CASE("fully shard: tied parameters", "[fsdp]") {
  const auto step = [](const std::function<void(Net&)>& lay_out, const Place& place) {
    torch::manual_seed(1);
    Net net(true);
    lay_out(net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      plain_step(net, i, place);
      optimizer.step();
    }
    return std::pair(full_tensor(net->tokens->weight.detach()).clone(), full_tensor(net->head.detach()).clone());
  };
  const auto expected = step([](Net&) {}, [](const at::Tensor& x) { return x; });
  REQUIRE(expected.first.equal(expected.second));
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    const auto result = step([&](Net& net) { fully_shard(*net, mesh, with([](auto& o) { o.units = {"tokens", "blocks.*"}; })); },
                             [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor(); });
    require(at::allclose(result.first, expected.first, 1e-5, 1e-6) && result.first.equal(result.second), "test", "tied parameters differ");
  }));
}

TEST_CASE("fully shard: a module that is made in parts", "[fsdp][deferred]") {
  const auto expected = on_one_device(plain_step, at::kFloat);
  CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& plain) {
    const DeviceMesh mesh(c10::kCPU, plain.ranks(), {2, 2}, {"dp", "tp"});
    Spmd spmd(mesh);
    torch::manual_seed(1);
    std::optional<DeferredInit> deferred(mesh);
    Net net;
    deferred.reset();
    parallelize_module(*net, mesh, tensor_parallel({{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}}));
    fully_shard(*net, mesh["dp"]);
    materialize(*net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      plain_step(net, i, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0), replicate()}).tensor(); });
      optimizer.step();
    }
    std::vector<at::Tensor> parameters;
    for (const auto& p : net->parameters()) parameters.push_back(full_tensor(p.detach()).clone());
    compare("parameter", parameters, expected.parameters, 1e-4);
  }));
}

TEST_CASE("fully shard: gathered and reduced in other dtypes", "[fsdp]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    FullyShardOptions options;
    options.param_dtype = at::kBFloat16;
    options.reduce_dtype = at::kFloat;
    const auto sharded = fully_shard(*net, mesh, options);
    const auto input = distribute_tensor(fractions({6, 12}), mesh, {shard(0)});
    const auto& up = net->blocks[0]->as<Block>()->up;
    CommDebugMode traffic;
    const auto y = at::linear(input->to(at::kBFloat16), up->weight.to(at::kBFloat16), up->bias.to(at::kBFloat16));
    require(sharded.gathers() == 1 && traffic.count() == 1, "test", "{} gathers and {} collectives", sharded.gathers(), traffic.count());
    int64_t bytes = 0;
    for (const auto& unit : sharded.units()) bytes = std::max(bytes, unit.piece * 2);
    require(traffic.bytes() <= bytes, "test", "gathered in float32");
    y.to(at::kFloat).sum().backward();
    require(up->weight.grad().scalar_type() == at::kFloat, "test", "the gradient has another dtype than the parameter");
    const auto expected = full_tensor(input.tensor()).to(at::kBFloat16).to(at::kFloat).sum(0);
    require(at::allclose(full_tensor(up->weight.grad())[3], expected, 1e-2, 1e-2), "test", "the gradient differs");
  }));
}

TEST_CASE("fully shard: padding is small", "[fsdp]") {
  for (const int ranks : {2, 7, 64, 256, 16384}) {
    Alone alone(ranks, ranks - 1);
    set_generator_check(GeneratorCheck::off);
    const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"dp"});
    Spmd spmd(mesh);
    DeferredInit deferred(mesh);
    auto list = torch::nn::ModuleList(Block(1024), Block(4096));
    for (const auto& unit : fully_shard(*list, mesh).units()) {
      INFO(ranks << " ranks, " << unit.name << ": pieces of " << unit.piece);
      REQUIRE(unit.padding < 0.03);
    }
  }
}

TEST_CASE("fully shard: says what it cannot do", "[fsdp][errors]") {
  Alone alone(2, 0);
  set_generator_check(GeneratorCheck::off);
  const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
  {
    Net plain;
    CHECK_THROWS_WITH(fully_shard(*plain, mesh), says("is a plain tensor; hint: build the module inside dt::Spmd"));
  }
  Spmd spmd(mesh);
  Net net;
  const auto with_units = [](std::vector<std::string> units) { return with([&](auto& o) { o.units = std::move(units); }); };
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with_units({"block.*"})), says("no module is matched by 'block.*'"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with_units({"blocks.0", "blocks.?"})),
                    says("'blocks.0' is listed twice, by 'blocks.0' and 'blocks.?'"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with_units({"blocks", "blocks.1"})),
                    says("'blocks.1' is listed twice, by 'blocks' and 'blocks.1'"));
  CHECK_THROWS_WITH(fully_shard({net.get(), net.get()}, mesh), says("one module twice"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.max_whole_units = 0; })), says("max_whole_units 0"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.unit_bytes = -5; })), says("unit_bytes -5"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.block = int64_t{1} << 62; })), says("expected 1 to 1073741824"));
  for (const double factor : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    CHECK_THROWS_WITH(fully_shard(*net, mesh, with([factor](auto& o) { o.gradient_divide_factor = factor; })),
                      says("expected a number above 0"));
  }
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.param_dtype = at::kLong; })),
                    says("expected a dtype of floating-point numbers"));
  CHECK_THROWS_WITH(fully_shard(*net, DeviceMesh(c10::kCPU, {0, 1}, {2}, {"tp"})), says("tp"));
  Net cut;
  redistribute_(cut->head, {shard(0)});
  CHECK_THROWS_WITH(fully_shard(*cut, mesh), says("'head' is not whole along"));
  fully_shard(*net, mesh);
  CHECK_THROWS_WITH(fully_shard(*net, mesh), says("every parameter is in a unit already"));
  CHECK_THROWS_WITH(redistribute_(net->head, {shard(0)}), says("lies in the flat buffer of a unit"));
  CHECK_THROWS_WITH(parallelize_module(*net, mesh, {{"head", {{"dp", shard(0)}}}}), says("where fully_shard cuts it already"));
}

TEST_CASE("fully shard: a plan that is refused leaves units as they were and one that is taken fits them", "[fsdp][parallel]") {
  CHECK_NOTHROW(on_mesh({2, 2}, [](const DeviceMesh& plain) {
    const DeviceMesh mesh(c10::kCPU, plain.ranks(), {2, 2}, {"dp", "tp"});
    Spmd spmd(mesh);
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 6));
    net[0]->as<torch::nn::Linear>()->weight.requires_grad_(false);
    fully_shard(*net, mesh["dp"], with([](auto& o) { o.units = {"0", "1"}; }));
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    const auto x = distribute_tensor(torch::ones({4, 4}), mesh, {shard(0), replicate()}).tensor();
    const Plan plan{{"*.weight", {{"tp", shard(0)}}}, {"*.bias", {{"tp", shard(0)}}}};
    const auto train = [&] {
      optimizer.zero_grad();
      net->forward(x).sum().backward();
      optimizer.step();
      return full_tensor(net->parameters()[3].detach()).clone();
    };
    const auto before = train();
    bool refused = false;
    try {
      parallelize_module(*net, mesh, plan);
    } catch (const Error&) {
      refused = true;
    }
    require(refused, "test", "parameters with gradients were laid out anew");
    require(train().equal(before - 2), "test", "a step after the refusal is another");
    for (auto& parameter : net->parameters()) parameter.mutable_grad() = at::Tensor();
    parallelize_module(*net, mesh, plan);
    require(train().equal(before - 4), "test", "a step after the plan is another");
  }));
}

namespace {

// As docs/training_kit.md has it.
struct Autocast {
  Autocast() {
    turn(true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    turn(false);
  }
  static void turn(bool on) {
#if DTENSOR_TORCH_AT_LEAST(2, 4)
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, on);
#else
    at::autocast::set_autocast_cpu_dtype(at::kBFloat16);
    at::autocast::set_cpu_enabled(on);
#endif
  }
};

struct Mixed {
  at::Tensor losses, gradients;  // of three steps, one after the other
};

Mixed train_mixed(const LayOut& lay_out, const Place& place, bool half = true) {
  torch::manual_seed(1);
  Net net;
  lay_out(net);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  std::vector<at::Tensor> losses, gradients;
  for (int step = 0; step < 3; ++step) {
    at::Tensor loss;
    {
      std::optional<Autocast> autocast;
      if (half) autocast.emplace();
      loss = loss_of(net, place(ids(step)));
    }
    optimizer.zero_grad();
    loss.backward();
    for (const auto& p : net->parameters()) {
      require(p.scalar_type() == at::kFloat && (!p.grad().defined() || p.grad().scalar_type() == at::kFloat), "test", "not float32");
      if (p.grad().defined()) gradients.push_back(full_tensor(p.grad()).flatten().clone());
    }
    losses.push_back(full_tensor(loss.detach()).to(at::kFloat).reshape({1}));
    optimizer.step();
  }
  NoSpmd plain;
  return {at::cat(losses), at::cat(gradients)};
}

double apart(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

}  // namespace

TEST_CASE("fully shard: mixed precision by autocast is as near to float32 as on one device", "[fsdp][autocast]") {
  const auto here = [](const at::Tensor& x) { return x; };
  const auto exact = train_mixed([](Net&) {}, here, false), one = train_mixed([](Net&) {}, here);
  const double rounding = 1.0 / 256, usual = apart(one.gradients, exact.gradients);  // of a bfloat16, and of the gradients of one device
  REQUIRE(usual > rounding / 16);  // autocast was on

  const auto near = [&](const char* name, const char* dim, Placement batch, const LayOut& lay_out) {
    INFO(name);
    CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& plain) {
      const DeviceMesh mesh(c10::kCPU, plain.ranks(), {2}, {dim});
      Spmd spmd(mesh);
      const auto got = train_mixed(lay_out, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {batch}).tensor(); });
      const double losses = apart(got.losses, exact.losses), gradients = apart(got.gradients, exact.gradients);
      require(losses < rounding, "test", "losses differ by {}", losses);
      require(gradients > usual / 2 && gradients < 2 * usual, "test", "gradients differ by {}; on one device by {}", gradients, usual);
    }));
  };
  near("data parallel", "dp", shard(0), [](Net&) {});
  near("tensor parallel", "tp", replicate(), [](Net& net) {
    parallelize_module(*net, *Spmd::current(), tensor_parallel({{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}}));
  });
  near("fully sharded", "dp", shard(0), sharded(with([](auto& o) { o.param_dtype = at::kBFloat16; })));
}

TEST_CASE("fully shard: units are gathered in half precision under autocast", "[fsdp][autocast]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    const auto sharded = fully_shard(*net, mesh, with([](auto& o) { o.param_dtype = at::kBFloat16; }));
    CommDebugMode traffic;
    {
      Autocast autocast;
      loss_of(net, distribute_tensor(ids(0), mesh, {shard(0)}));
    }
    int64_t gathered = 0, expected = 0;
    for (const auto& [line, totals] : traffic.lines()) gathered += line.op == "dtensor::fully_shard" ? totals.bytes : 0;
    for (const auto& unit : sharded.units()) expected += unit.piece * 2;
    require(gathered == expected, "test", "units gathered {} bytes; expected {}\n{}", gathered, expected, traffic.str());
  }));
}
