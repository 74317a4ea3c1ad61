// Attention over cut sequences in activation checkpoints: it is not computed again, nor are its messages sent again.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/nn/attention.hpp>
#include <dtensor/observe/comm_debug.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/training/checkpoint.hpp>

#include <ATen/record_function.h>
#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Calls of kernels of block attention's forward by this thread: libtorch's own, or the largest scores of a tile of ours.
class KernelCalls {
 public:
  KernelCalls() : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&KernelCalls::seen).scopes({at::RecordScope::FUNCTION}))) {
    count() = 0;
  }
  ~KernelCalls() { at::removeCallback(handle_); }
  static int& count() {
    static thread_local int calls = 0;
    return calls;
  }

 private:
  static std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
    const std::string name = function.name();
    count() += name == "aten::_scaled_dot_product_flash_attention_for_cpu" || name == "aten::amax";
    return nullptr;
  }
  const at::RecordFunctionGuard on_{true};
  const at::CallbackHandle handle_;
};

enum class Kept { nothing, attention, attention_twice, products };

struct CheckpointedPass {
  std::vector<at::Tensor> results;                // loss and gradients, whole
  int64_t forward_bytes = 0, backward_bytes = 0;  // of attention's messages
  int forward_kernels = 0, backward_kernels = 0;
};

int64_t message_bytes(const CommDebugMode& counted) {
  using comm::Collective;
  return counted.bytes(Collective::send) + counted.bytes(Collective::all_to_all) + counted.bytes(Collective::all_gather);
}

// Two layers of attention, each in a checkpoint or not.
CheckpointedPass checkpointed(const DeviceMesh& mesh, const std::string& method, double dropout, Kept kept) {
  torch::manual_seed(11);
  ContextParallel context(mesh, "cp", {.method = method});
  const auto leaf = [&](std::vector<int64_t> sizes) { return torch::randn(sizes, at::kDouble); };
  const auto x = distribute_tensor(context.order(leaf({2, 4, 24, 6}), 2), mesh, {shard(2)}).tensor().detach().requires_grad_();
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 2; ++i) weights.push_back(distribute_tensor(leaf({3, 6, 6}), mesh, {replicate()}).tensor().detach().requires_grad_());
  const auto layer = [dropout](const at::Tensor& in, const at::Tensor& weight) {
    const auto part = [&](int i) { return at::matmul(in, weight.select(0, i)); };
    return in + nn::attention(part(0), part(1), part(2), {.causal = true, .dropout = dropout}).tanh();
  };
  const auto run = [&](const at::Tensor& in, const at::Tensor& weight) {
    if (kept == Kept::nothing) return layer(in, weight);
    if (kept == Kept::products) return checkpoint({.save = matrix_products()}, layer, in, weight);
    return checkpoint(layer, in, weight);
  };
  const auto both = [&](const at::Tensor& in) { return run(run(in, weights[0]), weights[1]); };
  CheckpointedPass pass;
  const KernelCalls kernels;
  at::Tensor loss;
  {
    const CommDebugMode counted;
    loss = (kept == Kept::attention_twice ? checkpoint(both, x) : both(x)).square().sum();
    pass.forward_bytes = message_bytes(counted);
    pass.forward_kernels = std::exchange(KernelCalls::count(), 0);
  }
  const CommDebugMode counted;
  loss.backward();
  pass.backward_bytes = message_bytes(counted);
  pass.backward_kernels = KernelCalls::count();
  pass.results = {full_tensor(loss.detach()), full_tensor(x.grad()), full_tensor(weights[0].grad()), full_tensor(weights[1].grad()),
                  torch::rand({2})};
  return pass;
}

}  // namespace

TEST_CASE("context checkpoint: attention and its messages are not done again", "[context][checkpoint]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const std::string method : {"ring", "doublering", "allgather", "tokenring", "ulysses", "usp"}) {
      for (const double dropout : {0.0, 0.25}) {
        CAPTURE(transport, method, dropout);
        REQUIRE_NOTHROW(on_ranks(
            4,
            [&](World&) {
              const auto mesh = init_device_mesh(c10::kCPU, {4}, {"cp"});
              const auto straight = checkpointed(mesh, method, dropout, Kept::nothing);
              require(straight.forward_kernels > 0 && straight.backward_kernels == 0, "test", "{} and {} kernels were counted",
                      straight.forward_kernels, straight.backward_kernels);
              for (const auto kept : {Kept::attention, Kept::attention_twice, Kept::products}) {
                const auto got = checkpointed(mesh, method, dropout, kept);
                for (size_t i = 0; i < got.results.size(); ++i) {
                  require(got.results[i].equal(straight.results[i]), "test", "result {} differs", i);
                }
                require(got.backward_kernels == 0, "test", "{} kernels ran again", got.backward_kernels);
                require(got.forward_bytes == straight.forward_bytes, "test", "the forward sent more");
                const bool trades = method == "ulysses" || method == "usp";  // queries, keys and values again, 4 heads each
                const int64_t again = trades ? 2 * 3 * 2 * 4 * 6 * 6 * 8 : 0;
                require(got.backward_bytes == straight.backward_bytes + again, "test", "the backward sent {} and not {} + {}",
                        got.backward_bytes, straight.backward_bytes, again);
              }
            },
            transport));
      }
    }
  }
}

TEST_CASE("context checkpoint: a kept result that is written to is an error", "[context][checkpoint][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
    ContextParallel context(mesh, "cp", {.order = "contiguous"});
    const auto x = distribute_tensor(torch::ones({1, 1, 8, 2}), mesh, {shard(2)}).tensor().detach().requires_grad_();
    const auto y = checkpoint([](const at::Tensor& in) { return nn::attention(in, in * 2, in, {}).mul_(2); }, x);
    try {
      y.sum().backward();
    } catch (const c10::Error& error) {
      return require(says("was written to in place").match(error.what()) || says("modified by an inplace").match(error.what()), "test",
                     "it says: {}", error.what());
    }
    fail("test", "it was taken");
  }));
}
