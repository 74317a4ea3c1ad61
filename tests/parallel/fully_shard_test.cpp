// fully_shard: the numbers of one device, and of data parallelism bit for bit; what is communicated, and what is whole at once.
#include "tests/support/fully_shard_support.hpp"

#include <dtensor/optim/adam8bit.hpp>
#include <dtensor/optim/lamb.hpp>
#include <dtensor/optim/muon.hpp>
#include <fmt/ranges.h>

#include <cmath>
#include <optional>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::test::sharding;

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
      const auto own = train(
          lay_out, plain_step, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor(); }, at::kFloat);
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

namespace {

// Training by such steps gives the numbers of one device, under all options.
void check_step(const char* step_name, const TrainStep& step) {
  const auto expected = on_one_device(step);
  for (const auto& [name, options] : kOptions) {
    INFO(step_name << " with " << name);
    check(expected, {3}, {"dp"}, {shard(0)}, sharded(options), step);
  }
}

}  // namespace

TEST_CASE("fully shard: several passes in a step", "[fsdp]") {
  check_step("two forwards before one backward", [](Net& net, int i, const Place& place) {
    (loss_of(net, place(ids(i))) + loss_of(net, place(ids(i + 5)))).backward();
  });
  check_step("two backwards", [](Net& net, int i, const Place& place) {
    loss_of(net, place(ids(i))).backward();
    loss_of(net, place(ids(i + 5))).backward();
  });
  check_step("accumulation without communication", [](Net& net, int i, const Place& place) {
    {
      NoSync no_sync;
      loss_of(net, place(ids(i))).backward();
      loss_of(net, place(ids(i + 5)), {1}).backward();
    }
    loss_of(net, place(ids(i + 3))).backward();
  });
  check_step("all of it without communication", [](Net& net, int i, const Place& place) {
    NoSync no_sync;
    loss_of(net, place(ids(i))).backward();
    loss_of(net, place(ids(i + 5))).backward();
  });
}

TEST_CASE("fully shard: steps that are not alike", "[fsdp]") {
  check_step("another order each step", [](Net& net, int i, const Place& place) {
    const std::vector<std::vector<int>> orders{{2, 0}, {0, 1, 2, 1}, {1}};
    loss_of(net, place(ids(i)), orders[i]).backward();
  });
  check_step("frozen parameters", [](Net& net, int i, const Place& place) {
    for (auto& p : net->blocks[1]->parameters()) p.set_requires_grad(false);
    net->tokens->weight.set_requires_grad(i == 1);
    loss_of(net, place(ids(i))).backward();
  });
}

TEST_CASE("fully shard: values that are written between passes", "[fsdp]") {
  check_step("gradients that are zeroed in place", [](Net& net, int i, const Place& place) {
    loss_of(net, place(ids(i + 1))).backward();
    for (auto& p : net->parameters()) {
      if (p.grad().defined()) p.mutable_grad().zero_();
    }
    loss_of(net, place(ids(i))).backward();
  });
  check_step("a forward without gradient between", [](Net& net, int i, const Place& place) {
    loss_of(net, place(ids(i))).backward();
    torch::NoGradGuard no_grad;
    loss_of(net, place(ids(i)));
    net->blocks[0]->as<Block>()->up->weight.mul_(1.5);
    loss_of(net, place(ids(i)));
  });
  check_step("a parameter written between forward passes", [](Net& net, int i, const Place& place) {
    {
      torch::NoGradGuard no_grad;
      loss_of(net, place(ids(i)));
      net->head.data().mul_(0.5);
      net->head.slice(0, 2, 5).add_(1);
    }
    loss_of(net, place(ids(i))).backward();
  });
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
    require(units.size() == 4 && units[0].name == "blocks.0" && units[3].name == "(rest)", "test",
            "other units than the blocks and the rest");
    const auto check_memory = [&] {
      const char* end = nullptr;
      for (const auto& p : net->blocks[0]->parameters()) {
        const auto& part = local_shard(p);
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
      const auto& part = local_shard(p.grad());
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
    bytes += local_shard(parameter).nbytes() + (parameter.grad().defined() ? local_shard(parameter.grad()).nbytes() : 0);
  }
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adamw = static_cast<const torch::optim::AdamWParamState&>(*state);
    bytes += local_shard(adamw.exp_avg()).nbytes() + local_shard(adamw.exp_avg_sq()).nbytes();
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
      require(options.reduce_at_read || held <= 4 * pieces, "test", "{} bytes of parameters, gradients and states in pieces of {}", held,
              pieces);
      require(!options.reshard_after_forward || sharded.peak_whole_bytes() <= options.max_whole_units * largest, "test",
              "{} bytes were whole", sharded.peak_whole_bytes());
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
    for (const int64_t ranks : {1, 3}) {
      CHECK_NOTHROW(on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        Spmd spmd(mesh);
        const auto got = train_with([&](Net& net) { fully_shard(*net, mesh); },
                                    [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor(); });
        compare("parameter", got, expected, 1e-8);
      }));
    }
  }
}
