// Marks in models: what they move, and what a marked tensor-parallel block communicates.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include "examples/zoo/gpt2.hpp"
#include "examples/zoo/llama3.hpp"
#include "examples/zoo/vit.hpp"

#include <array>
#include <functional>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kWidth = 32, kLength = 8;

// all_gathers, reduce_scatters and all_reduces of activations.
std::array<int64_t, 3> counted(const CommDebugMode& comm) {
  std::array<int64_t, 3> counts{};
  for (const auto& [line, totals] : comm.lines()) {
    if (line.op == "gradient") continue;  // of the norms, whose weights are whole
    const auto kind = line.kind == comm::Collective::all_gather ? 0 : line.kind == comm::Collective::reduce_scatter ? 1 : 2;
    counts[kind] += totals.count;
  }
  return counts;
}

using Forward = std::function<at::Tensor(const at::Tensor&)>;

// A forward and a backward pass of a block [1, length, width] -> the same, over `ranks`; with positions cut or not.
void check_traffic(int64_t ranks, bool positions, const std::function<std::pair<std::shared_ptr<torch::nn::Module>, Forward>()>& make) {
  on_mesh({1, ranks}, [&](const DeviceMesh& unnamed) {
    const auto mesh = DeviceMesh(c10::kCPU, unnamed.ranks(), {1, ranks}, {"dp", "tp"});
    const Spmd spmd(mesh);
    torch::manual_seed(0);
    const auto [block, forward] = make();
    parallelize_module(*block, mesh, automatic_plan(*block));
    const auto along = positions ? shard(1) : replicate();
    const auto x = redistribute(fractions({1, kLength, kWidth}), {replicate(), along}).detach().requires_grad_();
    const auto gradient = redistribute(fractions({1, kLength, kWidth}), {replicate(), along});
    const auto expected = positions ? std::array<int64_t, 3>{2, 2, 0} : std::array<int64_t, 3>{0, 0, 2};
    CommDebugMode comm;
    const auto y = lay_out(forward(x), "tp", along);
    require(counted(comm) == expected, "test", "forward: {}", comm.str());
    comm.reset();
    y.backward(gradient);
    const auto of_input = lay_out(x.grad(), "tp", along);
    require(counted(comm) == expected, "test", "backward: {}", comm.str());
  });
}

template <class Block, class Options>
std::pair<std::shared_ptr<torch::nn::Module>, Forward> block_of(const Options& options) {
  Block block(options);
  return {block.ptr(), [block](const at::Tensor& x) mutable { return block->forward(x); }};
}

}  // namespace

TEST_CASE("marks: blocks communicate as the theory of tensor and sequence parallelism says", "[marks]") {
  for (const int64_t ranks : {2, 4}) {
    for (const bool positions : {false, true}) {
      CAPTURE(ranks, positions);
      REQUIRE_NOTHROW(check_traffic(ranks, positions, [] {
        zoo::Llama3Options options;
        options.dim = kWidth, options.heads = 4, options.kv_heads = 4, options.hidden = 64;
        zoo::Llama3Block block(options);
        const Forward forward = [block](const at::Tensor& x) mutable {
          return block->forward(x, nn::rotary_table(kLength, kWidth / 4, {}, x));
        };
        return std::pair(std::static_pointer_cast<torch::nn::Module>(block.ptr()), forward);
      }));
      REQUIRE_NOTHROW(check_traffic(ranks, positions, [] {
        zoo::Gpt2Options options;
        options.dim = kWidth, options.heads = 4, options.dropout = 0;
        return block_of<zoo::Gpt2Block>(options);
      }));
      REQUIRE_NOTHROW(check_traffic(ranks, positions, [] {
        zoo::VitOptions options;
        options.dim = kWidth, options.heads = 4, options.hidden = 64;
        return block_of<zoo::VitBlock>(options);
      }));
    }
  }
}

TEST_CASE("marks: leave alone what is in place", "[marks]") {
  const auto plain = fractions({2, 4}), weight = fractions({4, 4});
  REQUIRE(prepare_input(plain, weight).is_same(plain));
  REQUIRE(lay_out(plain, "tp", shard(0)).is_same(plain));
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& unnamed) {
    const auto mesh = DeviceMesh(c10::kCPU, unnamed.ranks(), {2}, {"tp"});
    const at::Tensor whole = distribute_tensor(fractions({2, 4}), mesh, {replicate()});
    const at::Tensor cut = lay_out(whole, "tp", shard(1));
    const at::Tensor weight = distribute_tensor(fractions({4, 4}), mesh, {shard(0)});
    require(lay_out(whole, "dp", shard(0)).is_same(whole), "test", "moved along a dimension that there is not");
    require(DTensor(cut).placements()[0] == shard(1), "test", "not cut");
    require(prepare_input(cut, weight).is_same(cut), "test", "moved for a weight that may move");
    pin(weight);
    require(prepare_input(whole, weight).is_same(whole), "test", "moved what is whole");
    const auto prepared = prepare_input(cut, weight);
    require(DTensor(prepared).placements()[0].is_replicate() && full_tensor(prepared).equal(fractions({2, 4})), "test", "not gathered");
  }));
}

TEST_CASE("marks: a layout that does not fit is refused", "[marks][errors]") {
  REQUIRE_THROWS_WITH(on_mesh({2}, [](const DeviceMesh& mesh) {
    lay_out(distribute_tensor(fractions({2, 4}), mesh, {replicate()}), mesh.names()[0], shard(2));
  }), says("S(2)"));
}

TEST_CASE("marks: an explicit sum counts for the module whose operator left it pending", "[marks]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(fractions({2, 4}), mesh, {shard(1)});
    const at::Tensor weight = distribute_tensor(fractions({3, 4}), mesh, {shard(1)});
    name_module(weight, "down");
    const Scope scope("block");
    CommDebugMode comm;
    const auto y = redistribute(at::linear(x, weight), {replicate()});
    require(full_tensor(y).equal(at::linear(fractions({2, 4}), fractions({3, 4}))), "test", "values");
    const bool counted = comm.modules().size() == 1 && comm.modules().count({"down", comm::Collective::all_reduce}) == 1;
    require(counted, "test", "{}", comm.module_str());
  }));
}
