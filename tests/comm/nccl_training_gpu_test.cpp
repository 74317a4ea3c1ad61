// Training with a GPU for each rank, under dtensor-run (nccl_gpu.sh): the gradients and parameters of the host, and one GPU's dropout.
// dropout.
#include "tests/comm/nccl/training_bodies.hpp"

#include <torch/cuda.h>

using namespace dtensor;
using namespace dtensor_tests;

namespace {

void train_in_every_way(World& world) {
  const int64_t n = world.size();
  const auto on = [&](const std::string& what, std::vector<int64_t> sizes, std::vector<std::string> names, Placements batch,
                      const LayOut& lay_out) {
    try {
      train_on_gpus(world, std::move(sizes), std::move(names), std::move(batch), lay_out);
    } catch (const c10::Error& error) {
      require(false, "test", "{}: {}", what, error.what_without_backtrace());
    }
    if (world.rank() == 0) fmt::print("{}: as on the host\n", what);
  };
  on("data parallel", {n}, {"dp"}, {shard(0)}, [](Net&) {});
  on("tensor parallel", {n}, {"tp"}, {replicate()}, cut_by_columns_and_rows);
  for (auto [name, options] : kOptions) {
    on(fmt::format("fully sharded, {}", name), {n}, {"dp"}, {shard(0)}, sharded(options));
    options.cpu_offload = true;
    on(fmt::format("fully sharded on the host, {}", name), {n}, {"dp"}, {shard(0)}, sharded(options));
  }
  if (n % 2 != 0 || n < 4) return;
  on("fully sharded, replicated", {n / 2, 2}, {"replicate", "dp"}, {shard(0), shard(0)}, sharded({}, {"replicate", "dp"}));
  on("fully sharded, tensor parallel", {n / 2, 2}, {"dp", "tp"}, {shard(0), replicate()}, [](Net& net) {
    cut_by_columns_and_rows(net);
    sharded()(net);
  });
}

// What one GPU draws, from its own stream, forward and in the backward pass's thread.
void draw_as_one_gpu(World& world) {
  const auto input = torch::arange(600, torch::kCUDA).to(at::kFloat).view({30, 20});
  const auto draw = [](const at::Tensor& x) {
    torch::manual_seed(5);
    const auto leaf = x.detach().requires_grad_();
    const auto dropped = torch::dropout(leaf, 0.4, true);
    at::Tensor backward;
    const auto last = dropped * 2;
    last.register_hook([&](const at::Tensor& gradient) { backward = torch::rand_like(gradient); });
    last.sum().backward();
    return std::vector<at::Tensor>{dropped.detach(), leaf.grad(), backward, torch::rand_like(x)};
  };
  const auto wanted = draw(input);
  const auto mesh = init_device_mesh(c10::kCUDA, {world.size()}, {"dp"});
  const auto got = draw(distribute_tensor(input, mesh, {shard(0)}).tensor());
  for (size_t i = 0; i < wanted.size(); ++i) require(full_tensor(got[i]).equal(wanted[i]), "test", "draw {} is not one GPU's", i);
  if (world.rank() == 0) fmt::print("dropout: as on one GPU\n");
}

}  // namespace

TEST_CASE("nccl gpu: training on the ranks of a job", "[comm][nccl][gpu][rank-program]") {
  if (!torch::cuda::is_available()) DTENSOR_SKIP("no GPU");
  if (!comm::has_nccl_transport()) DTENSOR_SKIP("this build has no nccl transport");
  char program[] = "dtensor-tests", transport[] = "--transport=nccl";
  char* argv[] = {program, transport, nullptr};
  CHECK(launch(2, argv, [&](World& world) {
          draw_as_one_gpu(world);  // from the device's own stream, which the rest replaces
          train_in_every_way(world);
        }) == 0);
}
