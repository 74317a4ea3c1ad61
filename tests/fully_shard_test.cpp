// fully_shard: the numbers of one device, and of data parallelism bit for bit; what is communicated, and what is whole at once.
#include "core_support.hpp"
#include "op_check.hpp"

#include <dtensor/optim/adam8bit.hpp>
#include <dtensor/optim/lamb.hpp>
#include <dtensor/optim/muon.hpp>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>
#include <optional>

using namespace dtensor;
using namespace dtensor::test;

namespace {

namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t d)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({d})))),
        up(register_module("up", nn::Linear(d, 2 * d + 1))),
        down(register_module("down", nn::Linear(2 * d + 1, d))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

// Embedding, three blocks, a head; `tied` to the embedding.
struct NetImpl : nn::Module {
  explicit NetImpl(bool tied = false) : tokens(register_module("tokens", nn::Embedding(11, kWidth))), blocks(register_module("blocks", nn::ModuleList())) {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block(kWidth));
    unused = register_parameter("unused", torch::ones({5}));
    head = register_parameter("head", tied ? tokens->weight : torch::randn({11, kWidth}) * 0.3);
  }
  at::Tensor forward(const at::Tensor& ids, std::vector<int> order = {0, 1, 2}) {
    auto x = tokens(ids);
    for (const int i : order) x = blocks[i]->as<Block>()->forward(x);
    return at::linear(x, head);
  }
  static constexpr int64_t kWidth = 12;
  nn::Embedding tokens;
  nn::ModuleList blocks;
  at::Tensor unused, head;
};
TORCH_MODULE(Net);

at::Tensor ids(int step) { return torch::arange(24).mul(7 + step).remainder(11).view({12, 2}); }

at::Tensor loss_of(Net& net, const at::Tensor& input, const std::vector<int>& order = {0, 1, 2}) {
  return torch::nn::functional::cross_entropy(net->forward(input, order).flatten(0, 1), input.flatten());
}

using LayOut = std::function<void(Net&)>;
using Place = std::function<at::Tensor(const at::Tensor&)>;
using TrainStep = std::function<void(Net&, int, const Place&)>;

struct Result {
  std::vector<at::Tensor> gradients, parameters;  // after the last step; whole
};

void plain_step(Net& net, int step, const Place& place) { loss_of(net, place(ids(step))).backward(); }

Result train(const LayOut& lay_out, const TrainStep& step, const Place& place, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(1);
  Net net;
  net->to(dtype);
  lay_out(net);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
  Result result;
  for (int i = 0; i < 3; ++i) {
    for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
    step(net, i, place);
    result.gradients.clear();
    for (const auto& p : net->parameters()) result.gradients.push_back(p.grad().defined() ? full_tensor(p.grad()).clone() : at::Tensor());
    optimizer.step();
  }
  for (const auto& p : net->parameters()) result.parameters.push_back(full_tensor(p.detach()).clone());
  return result;
}

Result on_one_device(const TrainStep& step = plain_step, at::ScalarType dtype = at::kDouble) {
  return train([](Net&) {}, step, [](const at::Tensor& x) { return x; }, dtype);
}

void compare(const std::string& what, const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected, double tolerance) {
  require(got.size() == expected.size(), "test", "{}: {} tensors", what, got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    require(got[i].defined() == expected[i].defined(), "test", "{} {} {} there", what, i, got[i].defined() ? "is" : "is not");
    if (!got[i].defined()) continue;
    const bool same = tolerance == 0 ? got[i].equal(expected[i]) : at::allclose(got[i], expected[i], tolerance, tolerance);
    require(same, "test", "{} {} differs by {}", what, i, (got[i] - expected[i]).abs().max().item<double>());
  }
}

// Trains on the mesh, the batch cut over its first dimensions, and compares with `expected`.
void check(const Result& expected, std::vector<int64_t> sizes, const std::vector<std::string>& names, Placements batch, const LayOut& lay_out,
           const TrainStep& step = plain_step, double tolerance = 1e-10, at::ScalarType dtype = at::kDouble, const char* transport = "threads") {
  CHECK_NOTHROW(on_mesh(
      sizes,
      [&](const DeviceMesh& plain) {
        const DeviceMesh mesh(c10::kCPU, plain.ranks(), sizes, names);
        Spmd spmd(mesh);
        const auto result = train(lay_out, step, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, batch).tensor(); }, dtype);
        compare("gradient", result.gradients, expected.gradients, tolerance);
        compare("parameter", result.parameters, expected.parameters, tolerance);
      },
      transport));
}

LayOut sharded(FullyShardOptions options = {}, std::initializer_list<std::string_view> dims = {"dp"}) {
  return [options, dims = std::vector<std::string_view>(dims)](Net& net) {
    const auto& mesh = *Spmd::current();
    fully_shard(*net, dims.size() == 1 ? mesh[dims[0]] : mesh[{dims[0], dims[1]}], options);
  };
}

FullyShardOptions with(const std::function<void(FullyShardOptions&)>& change) {
  FullyShardOptions options;
  change(options);
  return options;
}

const std::vector<std::pair<const char*, FullyShardOptions>> kOptions{
    {"ZeRO-3", {}},
    {"ZeRO-2", with([](auto& o) { o.reshard_after_forward = false; })},
    {"ZeRO-1", with([](auto& o) { o.reshard_after_forward = false, o.reduce_at_read = true; })},
    {"one whole unit", with([](auto& o) { o.max_whole_units = 1; })},
    {"three whole units", with([](auto& o) { o.max_whole_units = 3; })},
    {"by bytes", with([](auto& o) { o.unit_bytes = 3000; })},
    {"by pattern", with([](auto& o) { o.units = {"blocks.0|blocks.2", "tokens"}; })},
    {"blocks", with([](auto& o) { o.block = 8; })},
};

}  // namespace

TEST_CASE("fully shard: gradients and parameters are those of one device", "[fsdp]") {
  const auto expected = on_one_device();
  for (const auto& [name, options] : kOptions) {
    INFO(name);
    for (const int64_t ranks : {1, 2, 3, 4, 8}) check(expected, {ranks}, {"dp"}, {shard(0)}, sharded(options));
    check(expected, {3}, {"dp"}, {shard(0)}, sharded(options), plain_step, 1e-10, at::kDouble, "gloo");
  }
}

TEST_CASE("fully shard: float32 is bit for bit data parallelism", "[fsdp]") {
  const auto data_parallel = [&](const LayOut& lay_out, Result& result) {
    CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      const auto own = train(lay_out, plain_step, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor(); }, at::kFloat);
      if (mesh.coordinate(0) == 0) result = own;
    }));
  };
  Result replicated;
  data_parallel([](Net&) {}, replicated);
  for (const auto& [name, options] : kOptions) {
    INFO(name);
    Result result;
    data_parallel([&, options = options](Net& net) { fully_shard(*net, *Spmd::current(), options); }, result);
    CHECK_NOTHROW(compare("gradient", result.gradients, replicated.gradients, 0));
    CHECK_NOTHROW(compare("parameter", result.parameters, replicated.parameters, 0));
  }
}

TEST_CASE("fully shard: steps that are not alike", "[fsdp]") {
  struct Case {
    const char* name;
    TrainStep run;
  };
  const std::vector<Case> steps{
      {"two forwards before one backward", [](Net& net, int i, const Place& place) { (loss_of(net, place(ids(i))) + loss_of(net, place(ids(i + 5)))).backward(); }},
      {"two backwards",
       [](Net& net, int i, const Place& place) {
         loss_of(net, place(ids(i))).backward();
         loss_of(net, place(ids(i + 5))).backward();
       }},
      {"accumulation without communication",
       [](Net& net, int i, const Place& place) {
         {
           NoSync no_sync;
           loss_of(net, place(ids(i))).backward();
           loss_of(net, place(ids(i + 5)), {1}).backward();
         }
         loss_of(net, place(ids(i + 3))).backward();
       }},
      {"all of it without communication",
       [](Net& net, int i, const Place& place) {
         NoSync no_sync;
         loss_of(net, place(ids(i))).backward();
         loss_of(net, place(ids(i + 5))).backward();
       }},
      {"another order each step",
       [](Net& net, int i, const Place& place) {
         const std::vector<std::vector<int>> orders{{2, 0}, {0, 1, 2, 1}, {1}};
         loss_of(net, place(ids(i)), orders[i]).backward();
       }},
      {"frozen parameters",
       [](Net& net, int i, const Place& place) {
         for (auto& p : net->blocks[1]->parameters()) p.set_requires_grad(false);
         net->tokens->weight.set_requires_grad(i == 1);
         loss_of(net, place(ids(i))).backward();
       }},
      {"gradients that are zeroed in place",
       [](Net& net, int i, const Place& place) {
         loss_of(net, place(ids(i + 1))).backward();
         for (auto& p : net->parameters()) {
           if (p.grad().defined()) p.mutable_grad().zero_();
         }
         loss_of(net, place(ids(i))).backward();
       }},
      {"a forward without gradient between",
       [](Net& net, int i, const Place& place) {
         loss_of(net, place(ids(i))).backward();
         torch::NoGradGuard no_grad;
         loss_of(net, place(ids(i)));
         net->blocks[0]->as<Block>()->up->weight.mul_(1.5);
         loss_of(net, place(ids(i)));
       }},
      {"a parameter written between forward passes",
       [](Net& net, int i, const Place& place) {
         {
           torch::NoGradGuard no_grad;
           loss_of(net, place(ids(i)));
           net->head.data().mul_(0.5);
           net->head.slice(0, 2, 5).add_(1);
         }
         loss_of(net, place(ids(i))).backward();
       }},
  };
  for (const auto& [step_name, step] : steps) {
    const auto expected = on_one_device(step);
    for (const auto& [name, options] : kOptions) {
      INFO(step_name << " with " << name);
      check(expected, {3}, {"dp"}, {shard(0)}, sharded(options), step);
    }
  }
}

TEST_CASE("fully shard: over two mesh dimensions", "[fsdp]") {
  const auto expected = on_one_device();
  for (const auto& [name, options] : kOptions) {
    INFO(name);
    check(expected, {2, 3}, {"replicate", "shard"}, {shard(0), shard(0)}, sharded(options, {"replicate", "shard"}));
  }
  check(expected, {2, 2}, {"dp", "other"}, {shard(0), replicate()}, sharded());      // a dimension on which all is the same
  check(expected, {2, 2}, {"dp", "sp"}, {shard(0), shard(1)}, sharded());            // and one that cuts the batch otherwise
}

TEST_CASE("fully shard: with tensor parallelism in either order", "[fsdp]") {
  const auto expected = on_one_device();
  auto plan = tensor_parallel({{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}, {"tokens", VocabParallel()}});
  plan.push_back({"head", {{"tp", shard(0)}}});
  for (const auto& [name, options] : kOptions) {
    INFO(name);
    for (const auto& sizes : {std::vector<int64_t>{2, 2}, {2, 3}, {3, 2}}) {
      check(expected, sizes, {"dp", "tp"}, {shard(0), replicate()}, [&, options = options](Net& net) {
        const auto& mesh = *Spmd::current();
        parallelize_module(*net, mesh, plan);
        fully_shard(*net, mesh["dp"], options);
      });
      check(expected, sizes, {"dp", "tp"}, {shard(0), replicate()}, [&, options = options](Net& net) {
        const auto& mesh = *Spmd::current();
        fully_shard(*net, mesh["dp"], options);
        parallelize_module(*net, mesh, plan);
        require(DTensor(net->head).sizes() == c10::IntArrayRef({11, 12}), "test", "the sizes are not global");
      });
    }
    check(expected, {2, 2}, {"tp", "dp"}, {replicate(), shard(0)}, [&, options = options](Net& net) {
      parallelize_module(*net, *Spmd::current(), plan);
      fully_shard(*net, (*Spmd::current())["dp"], options);
    });
  }
}

TEST_CASE("fully shard: parameters are views of one buffer and gathered views of another", "[fsdp]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    const auto units = fully_shard(*net, mesh).units();
    require(units.size() == 4 && units[0].name == "blocks.0" && units[3].name == "(rest)", "test", "other units than the blocks and the rest");
    const auto check_memory = [&] {
      const char* end = nullptr;
      for (const auto& p : net->blocks[0]->parameters()) {
        const auto& part = part_of(p);
        if (part.numel() == 0) continue;
        const auto* memory = static_cast<const char*>(part.data_ptr());
        require(!end || (memory >= end && memory < end + 64), "test", "a parameter does not follow the one before");
        end = memory + part.nbytes();
      }
    };
    check_memory();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    loss_of(net, distribute_tensor(ids(0), mesh, {shard(0)})).backward();
    optimizer.step();
    check_memory();
    const char* end = nullptr;
    for (const auto& p : net->blocks[0]->parameters()) {
      const auto& part = part_of(p.grad());
      if (part.numel() == 0) continue;
      const auto* memory = static_cast<const char*>(part.data_ptr());
      require(!end || (memory >= end && memory < end + 64), "test", "a gradient does not follow the one before");
      end = memory + part.nbytes();
    }
  }));
}

// Bytes on this rank of parameters, gradients and AdamW's states.
int64_t held_bytes(torch::nn::Module& module, torch::optim::AdamW& optimizer) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) {
    bytes += part_of(parameter).nbytes() + (parameter.grad().defined() ? part_of(parameter.grad()).nbytes() : 0);
  }
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adamw = static_cast<const torch::optim::AdamWParamState&>(*state);
    bytes += part_of(adamw.exp_avg()).nbytes() + part_of(adamw.exp_avg_sq()).nbytes();
  }
  return bytes;
}

TEST_CASE("fully shard: what is communicated and what is whole at once", "[fsdp]") {
  for (const auto& [name, options] : kOptions) {
    INFO(name);
    CHECK_NOTHROW(on_mesh({2}, [options = options](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      Net net;
      const auto sharded = fully_shard(*net, mesh, options);
      const auto units = sharded.units();
      torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        CommDebugMode traffic;
        const auto gathers = sharded.gathers();
        loss_of(net, distribute_tensor(ids(step), mesh, {shard(0)})).backward();
        optimizer.step();
        const auto n = static_cast<int64_t>(units.size());
        const auto reduced = traffic.count(comm::Collective::reduce_scatter), gathered = traffic.count(comm::Collective::all_gather);
        require(reduced == n, "test", "{} reduce_scatters of {} units:\n{}", reduced, n, traffic.str());
        require(gathered == sharded.gathers() - gathers, "test", "gathers other than of units");
        require(gathered <= 2 * n, "test", "{} all_gathers of {} units", gathered, n);
        require(options.reshard_after_forward || gathered == n, "test", "{} all_gathers of {} units that stay", gathered, n);
        require(sharded.whole_bytes() == 0, "test", "{} bytes are whole after a step", sharded.whole_bytes());
      }
      int64_t largest = 0, pieces = 0;
      for (const auto& unit : units) largest = std::max(largest, unit.piece * mesh.size() * 4), pieces += unit.piece * 4;
      const auto held = held_bytes(*net, optimizer);
      require(options.reduce_at_read || held <= 4 * pieces, "test", "{} bytes of parameters, gradients and states in pieces of {}", held, pieces);
      require(!options.reshard_after_forward || sharded.peak_whole_bytes() <= options.max_whole_units * largest, "test", "{} bytes were whole",
              sharded.peak_whole_bytes());
    }));
  }
}

TEST_CASE("fully shard: with optimizers that need more than an element at a time", "[fsdp][optim]") {
  const std::vector<std::pair<const char*, std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>>> optimizers{
      {"Muon", [](std::vector<at::Tensor> p) {
         std::erase_if(p, [](const at::Tensor& t) { return t.dim() != 2; });
         return std::make_unique<optim::Muon>(p, optim::MuonOptions(0.02));
       }},
      {"Adam8bit", [](std::vector<at::Tensor> p) { return std::make_unique<optim::Adam8bit>(p, optim::Adam8bitOptions(0.01)); }},
      {"LAMB", [](std::vector<at::Tensor> p) { return std::make_unique<optim::Lamb>(p, optim::LambOptions(0.01)); }},
  };
  for (const auto& [name, make] : optimizers) {
    INFO(name);
    const auto train_with = [&, make = make](const LayOut& lay_out, const Place& place) {
      torch::manual_seed(1);
      Net net;
      net->to(at::kDouble);
      lay_out(net);
      auto parameters = net->parameters();
      std::erase_if(parameters, [&](const at::Tensor& p) { return p.is_same(net->unused); });
      const auto optimizer = make(parameters);
      for (int i = 0; i < 3; ++i) {
        optimizer->zero_grad();
        plain_step(net, i, place);
        clip_grad_norm_(parameters, 0.5);
        optimizer->step();
      }
      std::vector<at::Tensor> whole;
      for (const auto& p : net->parameters()) whole.push_back(full_tensor(p.detach()).clone());
      return whole;
    };
    const auto expected = train_with([](Net&) {}, [](const at::Tensor& x) { return x; });
    CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      const auto got = train_with([&](Net& net) { fully_shard(*net, mesh); },
                                  [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor(); });
      compare("parameter", got, expected, 1e-8);
    }));
  }
}

TEST_CASE("fully shard: units are gathered where communication is explicit", "[fsdp]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    const auto sharded = fully_shard(*net, mesh);
    const auto input = distribute_tensor(fractions({6, 12}), mesh, {shard(0)});
    const auto region = explicit_communication();
    net->blocks[0]->as<Block>()->forward(input.tensor()).sum().backward();
    require(sharded.gathers() > 0 && sharded.reductions() == 1, "test", "{} gathers, {} reductions", sharded.gathers(), sharded.reductions());
  }));
}

// The same on one device and on a mesh of dp x tp ranks, of a Linear layer whose weight is cut so over tp and then sharded.
void check_views(const std::vector<int64_t>& sizes, const Placement& cut, const std::vector<std::vector<int64_t>>& views) {
  const auto values = [&](const at::Tensor& weight) {
    std::vector<at::Tensor> results;
    for (const auto& view : views) {
      const auto part = weight.view(view).select(0, 1).mul(2).sum();
      results.push_back(part.detach());
      part.backward();
    }
    results.push_back(weight.grad());
    return results;
  };
  const auto weight = fractions(sizes).requires_grad_();
  const auto expected = values(weight);
  CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& plain) {
    const DeviceMesh mesh(c10::kCPU, plain.ranks(), {2, 2}, {"dp", "tp"});
    Spmd spmd(mesh);
    nn::Linear layer(nn::LinearOptions(sizes[1], sizes[0]).bias(false));
    {
      at::NoGradGuard no_grad;
      layer->weight.copy_(fractions(sizes));
    }
    parallelize_module(*layer, mesh, {{"weight", {{"tp", cut}}}});
    fully_shard(*layer, mesh["dp"]);
    const auto got = values(layer->weight);
    for (size_t i = 0; i < got.size(); ++i) {
      require(full_tensor(got[i]).allclose(expected[i], 1e-6, 1e-6), "test", "result {} of {} cut as {} is {}", i, sizes, cut.str(),
              full_tensor(got[i]).sum().item<double>());
    }
  }));
}

TEST_CASE("fully shard: views of a weight that move what tensor parallelism cut", "[fsdp]") {
  check_views({10, 6}, shard(0), {{5, 12}, {15, 4}});
  check_views({6, 10}, shard(1), {{5, 12}, {6, 5, 2}});
  check_views({12, 6}, shard(0), {{3, 4, 6}, {4, 3, 6}});
  check_views({6, 12}, shard(1), {{6, 3, 4}, {2, 3, 12}});
  check_views({18, 6}, strided_shard(0, 3), {{3, 6, 6}, {3, 2, 3, 6}});
}

TEST_CASE("fully shard: hooks of gradients get what backward brings", "[fsdp]") {
  const auto seen_and_summed = [](nn::Linear& layer, const at::Tensor& x, bool no_sync) {
    std::vector<double> seen;
    layer->weight.register_hook([&seen](const at::Tensor& gradient) {
      seen.push_back(full_tensor(gradient).sum().item<double>());
      return gradient * 2;
    });
    for (int i = 0; i < 3; ++i) {
      std::optional<NoSync> kept;
      if (no_sync && i < 2) kept.emplace();
      layer(x).sum().backward();
    }
    seen.push_back(full_tensor(layer->weight.grad()).sum().item<double>());
    return seen;
  };
  nn::Linear plain(nn::LinearOptions(3, 1).bias(false));
  const auto expected = seen_and_summed(plain, torch::ones({4, 3}), false);
  for (const bool shards : {false, true}) {
    for (const bool no_sync : {false, true}) {
      CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
        Spmd spmd(mesh);
        nn::Linear layer(nn::LinearOptions(3, 1).bias(false));
        if (shards) fully_shard(*layer, mesh);
        const auto got = seen_and_summed(layer, distribute_tensor(torch::ones({4, 3}), mesh, {shard(0)}), no_sync);
        require(got == expected, "test", "shards {}, NoSync {}: {}, expected {}", shards, no_sync, got, expected);
      }));
    }
  }
}

TEST_CASE("fully shard: a gradient that is kept stays as it is", "[fsdp]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    nn::Linear layer(4, 4);
    fully_shard(*layer, mesh);
    const auto x = distribute_tensor(torch::ones({4, 4}), mesh, {shard(0)});
    const auto sum = [](const at::Tensor& tensor) { return full_tensor(tensor).sum().item<double>(); };
    for (const int backwards : {1, 2}) {
      layer->zero_grad();
      layer->weight.mutable_grad() = layer->bias.mutable_grad() = at::Tensor();
      for (int i = 0; i < backwards; ++i) layer(x.tensor()).sum().backward();
      require(sum(layer->weight.grad()) == 64 * backwards, "test", "{} after {}", sum(layer->weight.grad()), backwards);
      const auto kept = layer->weight.grad();
      layer->weight.mutable_grad() = at::Tensor();
      layer(x.tensor()).sum().backward();
      const std::vector<double> got{sum(layer->weight.grad()), sum(kept), sum(layer->bias.grad())};
      const std::vector<double> expected{64, 64.0 * backwards, 16.0 * (backwards + 1)};
      require(got == expected, "test", "{}, expected {}", got, expected);
    }
  }));
}

TEST_CASE("fully shard: ranks that use units in another order are found out", "[fsdp][errors]") {
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_THROWS_WITH(on_mesh({2}, [](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      Net net;
      const auto sharded = fully_shard(*net, mesh);
      const auto input = distribute_tensor(ids(0), mesh, {shard(0)});
      const auto order = mesh.coordinate(0) == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{2, 1, 0};
      loss_of(net, input, order).item<double>();
    }, transport), says("the ranks diverged") && says("for 'blocks"));
  }
}

TEST_CASE("fully shard: a module is converted before", "[fsdp][errors]") {
  CHECK_THROWS_WITH(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    fully_shard(*net, mesh);
    net->to(at::kDouble);
  }), says("call to() before fully_shard"));
}

TEST_CASE("fully shard: checkpointing gathers units", "[fsdp]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    Net net;
    const auto sharded = fully_shard(*net, mesh);
    const auto input = distribute_tensor(fractions({6, 12}), mesh, {shard(0)});
    CheckpointOptions selective;
    selective.save = matrix_products();
    CommDebugMode traffic;
    auto x = input.tensor();
    for (int i = 0; i < 3; ++i) {
      auto* block = net->blocks[i]->as<Block>();
      x = checkpoint(selective, [block](const at::Tensor& y) { return block->forward(y); }, x);
    }
    require(traffic.count(comm::Collective::all_gather) == 3, "test", "forward:\n{}", traffic.str());
    x.sum().backward();
    require(traffic.count(comm::Collective::all_gather) <= 6, "test", "with backward:\n{}", traffic.str());
  }));
}

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
    auto list = nn::ModuleList(Block(1024), Block(4096));
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
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with_units({"blocks.0", "blocks.?"})), says("'blocks.0' is listed twice, by 'blocks.0' and 'blocks.?'"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with_units({"blocks", "blocks.1"})), says("'blocks.1' is listed twice, by 'blocks' and 'blocks.1'"));
  CHECK_THROWS_WITH(fully_shard({net.get(), net.get()}, mesh), says("one module twice"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.max_whole_units = 0; })), says("max_whole_units 0"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.unit_bytes = -5; })), says("unit_bytes -5"));
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.block = int64_t{1} << 62; })), says("expected 1 to 1073741824"));
  for (const double factor : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    CHECK_THROWS_WITH(fully_shard(*net, mesh, with([factor](auto& o) { o.gradient_divide_factor = factor; })), says("expected a number above 0"));
  }
  CHECK_THROWS_WITH(fully_shard(*net, mesh, with([](auto& o) { o.param_dtype = at::kLong; })), says("expected a dtype of floating-point numbers"));
  CHECK_THROWS_WITH(fully_shard(*net, DeviceMesh(c10::kCPU, {0, 1}, {2}, {"tp"})), says("tp"));
  Net cut;
  redistribute_(cut->head, {shard(0)});
  CHECK_THROWS_WITH(fully_shard(*cut, mesh), says("'head' is not whole along"));
  fully_shard(*net, mesh);
  CHECK_THROWS_WITH(fully_shard(*net, mesh), says("every parameter is in a unit already"));
  CHECK_THROWS_WITH(redistribute_(net->head, {shard(0)}), says("lies in the flat buffer of a unit"));
  CHECK_THROWS_WITH(parallelize_module(*net, mesh, {{"head", {{"dp", shard(0)}}}}), says("where fully_shard cuts it already"));
}
