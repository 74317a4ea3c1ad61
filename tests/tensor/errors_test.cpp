// Bad input: a clear error on every rank, and nothing changed.
#include "catch.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>

#include <sstream>

namespace dt = dtensor;

namespace {

void run_ranks(int ranks, const std::function<void(dt::World&)>& body) {
  dt::LaunchOptions options;
  options.ranks = ranks;
  options.deadline = std::chrono::seconds(10);
  dt::launch(options, body);
}

// `call` must throw, on this rank, an error that contains every one of `parts`.
template <class Call>
void throws(const char* what, std::vector<std::string> parts, Call&& call) {
  std::string text;
  try {
    call();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  }
  dt::require(!text.empty(), "test", "{}: nothing was thrown", what);
  for (const auto& part : parts) {
    dt::require(text.find(part) != std::string::npos, "test", "{}: no '{}' in the error: {}", what, part, text);
  }
}

void same_values(const dt::DTensor& got, const torch::Tensor& expected) {
  dt::require(got.full_tensor().equal(expected), "test", "a refused call changed its operand");
}

}  // namespace

TEST_CASE("errors: operators", "[errors]") {
  REQUIRE_NOTHROW(run_ranks(2, [](dt::World& world) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {2}, {"tp"}), other = dt::init_device_mesh(torch::kCPU, {1, 2}, {"a", "b"});
    auto x = dt::distribute_tensor(torch::ones({4, 4}), mesh, {dt::shard(0)});
    auto y = dt::distribute_tensor(torch::ones({4, 4}), other, {dt::replicate(), dt::shard(0)});
    auto p = dt::from_local(torch::ones({4, 4}), mesh, {dt::partial()});
    throws("two meshes", {"aten::add", "two meshes", "tp", "hint"}, [&] { torch::add(x, y); });
    throws("plain operand", {"aten::add", "plain tensor", "[4, 4]", "Spmd"}, [&] { torch::add(x, torch::ones({4, 4})); });
    p->relu_();  // reduced, and brought back
    dt::require(p.full_tensor().eq(2).all().item<bool>() && p.placements()[0] == dt::partial(), "test", "in place on Partial");
    throws("metadata in place", {"aten::resize_", "out-of-place"}, [&] { x->resize_({2, 2}); });
    throws("wrong shapes", {"aten::mm"}, [&] { torch::mm(x, dt::distribute_tensor(torch::ones({3, 4}), mesh, {dt::replicate()})); });
    const auto table = dt::distribute_tensor(torch::ones({4, 2}), mesh, {dt::replicate()});
    const auto index = dt::distribute_tensor(torch::full({4}, 7), mesh, {dt::shard(0)});
    throws("libtorch's kernel",
           {"index out of range", "aten::embedding", "(R) [4, 2]", "(S(0)) [4]", "tp=2", fmt::format("rank {}", world.rank())},
           [&] { torch::embedding(table, index); });
    throws("storage", {"distributed tensor", "to_local"}, [&] { x->storage(); });
    throws("save", {"distributed tensor", "full_tensor"}, [&] {
      std::ostringstream out;
      torch::save(x.tensor(), out);
    });
    throws("not distributed", {"DTensor", "plain tensor", "distribute_tensor"}, [&] { dt::DTensor(torch::ones({2})); });
    same_values(x, torch::ones({4, 4}));
    auto explicit_only = dt::explicit_communication();
    throws("explicit", {"aten::relu", "argument 0", "P(sum)", "64 bytes", "redistribute"}, [&] { torch::relu(p); });
    throws("view that no placement expresses", {"aten::view", "explicit"}, [&] {
      dt::distribute_tensor(torch::ones({2, 6}), mesh, {dt::shard(1)})->view({3, 4});
    });
  }));
}

TEST_CASE("errors: layouts and parts", "[errors]") {
  REQUIRE_NOTHROW(run_ranks(2, [](dt::World& world) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto x = torch::ones({4, 4});
    throws("shard dim", {"3", "[4, 4]"}, [&] { dt::distribute_tensor(x, mesh, {dt::shard(3)}); });
    throws("placement count", {"2"}, [&] { dt::distribute_tensor(x, mesh, {dt::shard(0), dt::shard(1)}); });
    throws("split", {"3"}, [&] { dt::distribute_tensor(x, mesh, {dt::strided_shard(0, 3)}); });
    throws("parts of different sizes", {"from_local", "rank 1", "expected"}, [&] {
      dt::from_local(torch::ones({1 + world.rank() * 2, 3}), mesh, {dt::shard(0)});
    });
    throws("parts of different dtypes", {"from_local", "rank 1", "Double", "Float"}, [&] {
      dt::from_local(torch::ones({2, 2}, world.rank() == 0 ? torch::kFloat : torch::kDouble), mesh, {dt::shard(0)});
    });
    throws("part of the wrong size", {"from_local", "[2, 2]", "[3, 2]"}, [&] {
      dt::from_local(torch::ones({2, 2}), mesh, {dt::shard(0)}, {6, 2});
    });
    throws("mesh size", {"(3)", "2"}, [&] { dt::init_device_mesh(torch::kCPU, {3}); });
    throws("repeated name", {"a"}, [&] { dt::init_device_mesh(torch::kCPU, {1, 2}, {"a", "a"}); });
    throws("unknown name", {"dp", "tp"}, [&] { mesh["dp"]; });
  }));
}

TEST_CASE("errors: a plain tensor that differs between ranks", "[errors]") {
  REQUIRE_NOTHROW(run_ranks(3, [](dt::World& world) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {3}, {"dp"});
    dt::Spmd spmd(mesh);
    auto x = torch::ones({4});
    const auto mine = dt::DTensor(x).to_local() * (world.rank() == 2 ? 2 : 1);
    throws("differing plain tensor", {"aten::mul", "ranks 2", "from_local"}, [&] { torch::mul(x, mine); });
    throws("differing data", {"distribute_tensor", "ranks 2"}, [&] { dt::distribute_tensor(mine, mesh, {dt::shard(0)}); });
    const auto own = torch::tensor(std::vector<float>(4, world.rank() == 2 ? 2.F : 1.F));  // a factory makes it, as replicated
    throws("differing values of a factory", {"distribute_tensor", "ranks 2"}, [&] { dt::distribute_tensor(own, mesh, {dt::shard(0)}); });
    std::vector<float> buffer(4, static_cast<float>(world.rank()));  // what it holds is overwritten, and not compared
    torch::from_blob(buffer.data(), {4}).copy_(dt::distribute_tensor(torch::arange(4.F), mesh, {dt::shard(0)}));
    dt::require(buffer == std::vector<float>{0, 1, 2, 3}, "test", "a plain tensor that takes a sharded one's values");
    dt::set_replication_check(false);
    torch::sub(x, mine);
    dt::set_replication_check(true);
  }));
}

// What was equal at first may differ later: in a call that is remembered, and long after the first tensors that were laid out.
TEST_CASE("errors: a plain tensor that differs later", "[errors]") {
  const int step = GENERATE(1, 5, 300);
  REQUIRE_NOTHROW(run_ranks(3, [step](dt::World& world) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {3}, {"dp"});
    dt::Spmd spmd(mesh);
    const auto x = torch::ones({4});
    const auto plain = dt::DTensor(x).to_local();
    const auto until_refused = [&](const char* what, const std::function<void(const torch::Tensor&)>& use) {
      throws(what, {what, "ranks 2"}, [&] {
        for (int i = 0; i < 1100; ++i) use(i >= step && world.rank() == 2 ? plain * 2 : plain);
      });
    };
    until_refused("aten::mul", [&](const torch::Tensor& mine) { torch::mul(x, mine); });
    until_refused("aten::cat", [&](const torch::Tensor& mine) { torch::cat({x, mine}); });
    until_refused("distribute_tensor", [&](const torch::Tensor& mine) { dt::distribute_tensor(mine, mesh, {dt::shard(0)}); });
  }));
}

TEST_CASE("errors: plans", "[errors]") {
  REQUIRE_NOTHROW(run_ranks(2, [](dt::World&) {
    auto mesh = dt::init_device_mesh(torch::kCPU, {2}, {"tp"});
    torch::nn::Linear plain(4, 4), linear(nullptr);
    throws("plain module", {"parallelize_module", "'weight'", "Spmd"}, [&] { dt::parallelize_module(*plain, mesh, {}); });
    dt::Spmd spmd(mesh);
    linear = torch::nn::Linear(4, 4);
    throws("unknown dimension", {"dp", "tp"}, [&] { dt::parallelize_module(*linear, mesh, {{"weight", {{"dp", dt::shard(0)}}}}); });
    throws("no match", {"'wieght'", "weight"}, [&] { dt::parallelize_module(*linear, mesh, {{"wieght", {{"tp", dt::shard(0)}}}}); });
    throws("does not fit", {"'*'", "'bias'"}, [&] { dt::parallelize_module(*linear, mesh, {{"*", {{"tp", dt::shard(1)}}}}); });
    dt::require(dt::DTensor(linear->weight).layout().is_replicated(), "test", "a refused plan changed the weight");
  }));
}

TEST_CASE("errors: a plain operand is called plain and a mesh of GPUs needs them", "[errors]") {
  REQUIRE_NOTHROW(run_ranks(2, [](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto x = dt::distribute_tensor(torch::ones({4, 4}), mesh, {dt::shard(0)}).tensor();
    throws("a plain operand", {"(f32[4, 4] (S(0)) on (tp=2), f32[4] (plain))", "dt::Spmd"}, [&] { x * torch::ones({4}); });
    if (!torch::cuda::is_available() && !c10::impl::hasDeviceGuardImpl(c10::kCUDA))
      throws("a mesh of GPUs", {"needs a libtorch with CUDA", "torch::kCPU"}, [] { dt::init_device_mesh(torch::kCUDA, {2}); });
  }));
}
