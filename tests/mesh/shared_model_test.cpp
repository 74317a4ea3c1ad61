// Tensors that come to a rank from another rank's thread, or from a launch that has ended: said with what to do.
#include "tests/support/dispatch_support.hpp"

#include <atomic>

using namespace dtensor;
using namespace dtensor::test;

namespace {

void refuses(const std::function<void()>& call, const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    for (const auto& part : parts) require(text.find(part) != std::string::npos, "test", "'{}' is missing in: {}", part, text);
    return;
  }
  fail("test", "was not refused: {}", parts[0]);
}

const std::vector<std::string> kTold{"rank 0 of 2", "rank 1 of 2", "inside of the function that dt::launch runs"};

// A barrier that orders what threads do with variables of one process. (Each rank maps shared memory for itself, so that a barrier over it
// tells ThreadSanitizer nothing.)
struct Together {
  std::atomic<int> came = 0;
  void wait(World& world) {
    ++came;
    world.barrier();
    came.load();
  }
};

}  // namespace

TEST_CASE("shared tensors: of another rank", "[shared]") {
  for (const char* transport : {"threads", "shm"}) {
    at::Tensor made;  // by rank 0
    torch::nn::Linear model{nullptr};
    Together together;
    CHECK_NOTHROW(on_ranks(
        2,
        [&](World& world) {
          const auto mesh = line(world);
          const Spmd spmd(mesh);
          const auto x = torch::ones({2, 3});
          const torch::nn::Linear own(3, 4);  // all ranks draw
          if (world.rank() == 0) made = torch::ones({2, 3}), model = own;
          together.wait(world);
          if (world.rank() == 1) {
            refuses([&] { torch::add(x, made); }, kTold);
            refuses([&] { torch::relu(made); }, kTold);
            refuses([&] { model(x); }, kTold);
            refuses([&] { full_tensor(made); }, kTold);
            refuses([&] { distribute_tensor(made, mesh, {shard(0)}); }, kTold);
            refuses([&] { parallelize_module(*model, mesh, {}); }, kTold);
            refuses(
                [&] {
                  torch::optim::SGD(model->parameters(), 0.1);
                  made.add_(1);
                },
                kTold);
          }
          together.wait(world);
          if (world.rank() == 0) torch::add(x, made);
          together.wait(world);
        },
        transport));
  }
}

TEST_CASE("shared tensors: a plain model that was made before the launch", "[shared]") {
  torch::nn::Linear model(3, 4);
  try {
    on_ranks(2, [&](World& world) {
      const Spmd spmd(line(world));
      model(torch::ones({2, 3})).sum().backward();
      world.barrier();
    });
    FAIL("ranks shared gradients");
  } catch (const c10::Error& error) {
    CHECK_THAT(error.what_without_backtrace(), says("inside of the function that dt::launch runs"));
  }
}

TEST_CASE("shared tensors: of a launch that has ended", "[shared]") {
  at::Tensor kept;
  on_ranks(2, [&](World& world) {
    const Spmd spmd(line(world));
    const auto x = torch::ones({2, 3});
    if (world.rank() == 0) kept = x;
  });
  CHECK_NOTHROW(on_ranks(2, [&](World& world) {
    const Spmd spmd(line(world));
    refuses([&] { torch::add(torch::ones({2, 3}), kept); }, {"a launch that has ended", "inside of the function"});
    refuses([&] { torch::relu(kept); }, {"a launch that has ended"});
  }));
}
