// Training on meshes of CUDA devices, which stand-ins play: what dispatch, FSDP and autograd do where a device is not the host. Not what a
// GPU's kernels and libtorch's allocator make of it.
#include "tests/pch/pch.hpp"  // first: libtorch's logging has a CHECK of its own

#include "tests/comm/comm_bodies.hpp"
#include "tests/comm/nccl/fake_cuda.hpp"
#include "tests/comm/nccl/fake_ranks.hpp"
#include "tests/comm/nccl/training_bodies.hpp"
#include "tests/support/pipelined_model.hpp"

#include <optional>
#include <thread>

using namespace dtensor;
using namespace dtensor_tests;

namespace {

std::string train_on(std::vector<int64_t> sizes, const std::vector<std::string>& names, Placements batch, const LayOut& lay_out) {
  const auto ranks = static_cast<int>(c10::multiply_integers(sizes));
  return first_error(run_gpus(ranks, [&](World& world) { train_on_gpus(world, sizes, names, batch, lay_out); }));
}

}  // namespace

TEST_CASE("nccl stand-in: training on one GPU and data parallel", "[nccl]") {
  CHECK(train_on({1}, {"dp"}, {replicate()}, [](Net&) {}) == "");
  CHECK(train_on({2}, {"dp"}, {shard(0)}, [](Net&) {}) == "");
}

TEST_CASE("nccl stand-in: factories make tensors on the mesh's devices", "[nccl]") {
  CHECK(first_error(run_gpus(2, [](World& world) {
    use_counter(world);
    Spmd spmd(init_device_mesh(c10::kCUDA, {2}, {"dp"}));
    for (const auto& x : {torch::zeros({3}), torch::rand({3}), torch::arange(3), torch::randn({3}, torch::dtype(torch::kDouble))}) {
      require(is_dtensor(x) && x.is_cuda() && DTensor(x).to_local().is_cuda(), "test", "on {}", x.device().str());
    }
    const auto plain = torch::zeros({3}, torch::device(torch::kCPU));
    require(!is_dtensor(plain) && plain.is_cpu(), "test", "asked for on the host");
  })) == "");
}

TEST_CASE("nccl stand-in: what is drawn in a backward pass is the rank's", "[nccl]") {
  CHECK(first_error(run_gpus(2, [](World& world) {
    const auto x = distribute_tensor(to_gpu(torch::ones({5, 4})), init_device_mesh(c10::kCUDA, {2}, {"dp"}), {shard(0)}).tensor();
    const auto drawn = [&] {
      const auto dropped = std::get<0>(torch::native_dropout(x, 0.5, true));
      std::vector<at::Tensor> parts;
      for (const auto& tensor : {torch::zeros_like(x).uniform_(), torch::randn_like(x), at::normal(x, 1.0), dropped}) {
        parts.push_back(DTensor(tensor).to_local().cpu());
      }
      return parts;
    };
    use_counter(world);
    const auto wanted = drawn();
    use_counter(world);
    std::vector<at::Tensor> got;
    std::thread::id thread;
    const auto y = x.detach().requires_grad_().mul(2);
    y.register_hook([&](const at::Tensor&) {
      got = drawn();
      thread = std::this_thread::get_id();
    });
    y.sum().backward();
    require(thread != std::this_thread::get_id(), "test", "the backward pass ran in the rank's thread");
    for (size_t i = 0; i < wanted.size(); ++i) require(got.at(i).equal(wanted[i]), "test", "draw {} is of another stream", i);
  })) == "");
}

TEST_CASE("nccl stand-in: a dt Generator does not draw for a CUDA graph", "[nccl]") {
  CHECK(first_error(run_gpus(1, [](World& world) {
    use_counter(world);
    const auto x = torch::zeros({4}, torch::kCUDA);
    dtensor_tests::is_capturing = true;
    require(fails_with([&] { x.uniform_(); }, "[aten::uniform_] dt::Generator cannot draw while a CUDA graph"), "test", "it drew");
    torch::zeros({4}).uniform_();
    dtensor_tests::is_capturing = false;
    x.uniform_();
  })) == "");
}

TEST_CASE("nccl stand-in: fully sharded on GPUs", "[nccl]") {
  for (const auto& [name, options] : kOptions) {
    INFO(name);
    CHECK(train_on({2}, {"dp"}, {shard(0)}, sharded(options)) == "");
  }
  CHECK(train_on({2, 2}, {"replicate", "dp"}, {shard(0), shard(0)}, sharded({}, {"replicate", "dp"})) == "");
}

TEST_CASE("nccl stand-in: tensor parallel on GPUs", "[nccl]") {
  CHECK(train_on({2}, {"tp"}, {replicate()}, cut_by_columns_and_rows) == "");
  CHECK(train_on({2, 2}, {"dp", "tp"}, {shard(0), replicate()}, [&](Net& net) {
    cut_by_columns_and_rows(net);
    sharded()(net);
  }) == "");
}

TEST_CASE("nccl stand-in: a pipeline on GPUs", "[nccl]") {
  using namespace dtensor::test::pipelined;
  for (const std::string schedule : {"gpipe", "1f1b", "zbv", "dualpipev"}) {
    for (const auto reach : {Reach::none, Reach::tied, Reach::skips}) {
      INFO(schedule << " " << static_cast<int>(reach));
      CHECK(first_error(run_gpus(3, [&](World& world) {
        use_counter(world);
        const auto expected = dtensor::test::pipelined::on_one_device(7, 6, at::kDouble, reach);
        use_counter(world);
        const auto mesh = init_device_mesh(c10::kCUDA, {3}, {"pp"});
        check_close(on_a_pipeline(mesh, 7, at::kDouble, {.schedule = schedule, .microbatches = 6}, reach), expected);
      })) == "");
    }
  }
}

TEST_CASE("nccl stand-in: shards that are kept on the host", "[nccl]") {
  for (auto [name, options] : kOptions) {
    INFO(name);
    options.cpu_offload = true;
    CHECK(train_on({1}, {"dp"}, {replicate()}, sharded(options)) == "");
    CHECK(train_on({3}, {"dp"}, {shard(0)}, sharded(options)) == "");
    CHECK(train_on({2, 2}, {"replicate", "dp"}, {shard(0), shard(0)}, sharded(options, {"replicate", "dp"})) == "");
  }
}

TEST_CASE("nccl stand-in: shards on the host and tensor parallelism", "[nccl]") {
  const auto offload = with([](auto& o) { o.cpu_offload = true; });
  for (const bool before : {false, true}) {
    CHECK(train_on({2, 2}, {"dp", "tp"}, {shard(0), replicate()}, [&](Net& net) {
      if (before) cut_by_columns_and_rows(net);
      sharded(offload)(net);
      if (!before) cut_by_columns_and_rows(net);
    }) == "");
  }
}

TEST_CASE("nccl stand-in: what is where with shards on the host", "[nccl]") {
  CHECK(first_error(run_gpus(2, [](World& world) {
    use_counter(world);
    const auto mesh = init_device_mesh(c10::kCUDA, {2}, {"dp"});
    Spmd spmd(mesh);
    std::optional<DeferredInit> deferred(mesh);
    Net net;
    deferred.reset();
    const auto units = fully_shard(*net, mesh, with([](auto& o) { o.cpu_offload = true; }));
    materialize(*net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    loss_of(net, distribute_tensor(to_gpu(ids(0)), mesh, {shard(0)}).tensor()).backward();
    const double norm = clip_grad_norm_(net->parameters(), 0.1);
    require(norm > 0.1, "test", "norm {}", norm);
    optimizer.step();
    require(units.peak_whole_bytes() > 0, "test", "no unit was gathered");
    for (const auto& item : net->named_parameters()) {
      const auto& p = item.value();
      if (!p.grad().defined()) continue;
      require(p.is_cuda() && DTensor(p).to_local().is_cpu(), "test", "{} is on {}", item.key(), DTensor(p).to_local().device().str());
      require(DTensor(p.grad()).to_local().is_cpu(), "test", "the gradient of {}", item.key());
      require(p.detach().to(torch::kFloat).is_cuda() && p.view({-1}).is_cuda(), "test", "a view or copy of {}", item.key());
    }
    for (const auto& [key, state] : optimizer.state()) {
      const auto& adamw = static_cast<const torch::optim::AdamWParamState&>(*state);
      require(DTensor(adamw.exp_avg()).to_local().is_cpu(), "test", "a state");
    }
    const auto whole = full_tensor(net->head.detach());
    require(whole.sizes() == net->head.sizes(), "test", "whole");
    // By itself, where it is used in another dtype than its unit's.
    const auto y = at::mm(distribute_tensor(to_gpu(torch::ones({2, NetImpl::kWidth}, torch::kDouble)), mesh, {replicate()}).tensor(),
                          net->head.detach().to(torch::kDouble).t());
    require(full_tensor(y).cpu().allclose(whole.cpu().to(torch::kDouble).sum(1).expand({2, 11})), "test", "product");
  })) == "");
}
