// Rows that travel in fewer bits: how far they are off, what is sent, and that a plan is made once.
#include "tests/support/experts_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/observe/comm_debug.hpp>

namespace dtensor::test::experts {

namespace {

at::Tensor there_and_back(const char* format, const at::Tensor& x) {
  const auto& wire = expert::wire(format);
  const auto packed = wire.pack(x);
  require(packed.size(0) == x.size(0) && packed.size(1) * packed.element_size() == wire.bytes(x.size(1), x.element_size()), "test",
          "{}: a row has another size than is said", format);
  return wire.unpack(packed, x);
}

}  // namespace

TEST_CASE("wire: numbers are off by no more than their format says", "[experts]") {
  torch::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const int64_t dim : {1, 5, 128, 300}) {
      CAPTURE(dim, c10::toString(dtype));
      const auto x = torch::randn({7, dim}, dtype) * torch::randn({7, 1}, dtype).mul(8).exp();
      REQUIRE(there_and_back("exact", x).equal(x));
      const auto rounded = there_and_back("bfloat16", x);
      REQUIRE(rounded.scalar_type() == dtype);
      REQUIRE((rounded - x).abs().le(x.abs() / 256).all().item<bool>());
      const auto blocks = there_and_back("blocks8", x);
      REQUIRE(blocks.scalar_type() == dtype);
      for (int64_t begin = 0; begin < dim; begin += expert::kBlock) {
        const auto length = std::min(expert::kBlock, dim - begin);
        const auto block = x.narrow(1, begin, length);
        const auto bound = block.abs().amax(1, true) * (1.0001 / 254);
        REQUIRE((blocks.narrow(1, begin, length) - block).abs().le(bound).all().item<bool>());
      }
    }
  }
  REQUIRE(there_and_back("blocks8", torch::zeros({2, 130})).equal(torch::zeros({2, 130})));
  REQUIRE(there_and_back("blocks8", torch::zeros({0, 130})).size(0) == 0);
  REQUIRE(there_and_back("blocks8", torch::full({1, 130}, 127.0)).equal(torch::full({1, 130}, 127.0)));
}

TEST_CASE("wire: what is not finite arrives as NaN and spoils no other block", "[experts]") {
  auto x = torch::ones({2, 256});
  x[0][3] = std::numeric_limits<float>::infinity();
  x[1][200] = std::nan("");
  const auto y = there_and_back("blocks8", x);
  REQUIRE(y[0].narrow(0, 0, 128).isnan().all().item<bool>());
  REQUIRE(y[1].narrow(0, 128, 128).isnan().all().item<bool>());
  REQUIRE(y[0].narrow(0, 128, 128).equal(torch::ones({128})));
  REQUIRE(y[1].narrow(0, 0, 128).equal(torch::ones({128})));
}

TEST_CASE("wire: mixtures are near the exact ones and send fewer bytes", "[experts]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(
        2,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
          const auto c = mix_case({.tokens = {8, 8}, .dim = 256, .hidden = 16, .experts = 4}, true, at::kFloat);
          for (const std::string dispatch : {"alltoall", "deduplicated"}) {
            const auto run = [&](const std::string& rows, const std::string& results) {
              CommDebugMode counted;
              auto result = on_mesh(c, mesh, {shard(0)}, {shard(0)}, {.dispatch = dispatch, .rows = rows, .results = results});
              return std::pair(std::move(result), counted.bytes(comm::Collective::all_to_all));
            };
            const auto [exact, all] = run("exact", "exact");
            const auto [one_way, fewer] = run("bfloat16", "exact");
            check_same(one_way, exact, 0.03, dispatch + " bfloat16 to experts");
            const auto [both, half] = run("bfloat16", "bfloat16");
            check_same(both, exact, 0.03, dispatch + " bfloat16 both ways");
            const auto [small, least] = run("blocks8", "blocks8");
            check_same(small, exact, 0.06, dispatch + " blocks8");
            require(!small.y.equal(exact.y) && !both.y.equal(one_way.y), "test", "nothing was rounded");
            // Rows of 256 numbers, four times: 1024 bytes, 512, or 256 and two scales. Besides, deduplicated sends choices and weights.
            const auto rows = 2 * (all - fewer) / 1024;
            require(all - half == rows * 1024 && all - least == rows * 2 * (1024 - 264), "test", "{}: sent {}, {}, {}, {} bytes",
                    dispatch, all, fewer, half, least);
            if (dispatch == "alltoall") require(all == rows * 2 * 1024, "test", "sent {} bytes of {} rows", all, rows);
          }
        },
        transport));
  }
}

TEST_CASE("wire: what cannot be sent so is refused in words", "[experts]") {
  const auto c = mix_case();
  refuses("rows cannot travel as 'pigeon'", [&] { mix_experts(c.x, c.chosen, c.weights, c.experts(), {.rows = "pigeon"}); });
  refuses("allgather sends all numbers as they are",
          [&] { mix_experts(c.x, c.chosen, c.weights, c.experts(), {.dispatch = "allgather", .results = "blocks8"}); });
}

TEST_CASE("experts: a plan is made once for equal layouts", "[experts]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"ep"});
    const auto lay = [&](const at::Tensor& x, const Placement& p) { return distribute_tensor(x.detach(), mesh, {p}).tensor(); };
    const auto c = mix_case();
    const auto plan = [&](const Placement& of_x, const char* dispatch) {
      return expert::plan_for(lay(c.x, of_x), lay(c.w1, shard(0)), dispatch, "");
    };
    const auto first = plan(shard(0), "alltoall");
    require(first == plan(shard(0), "deduplicated"), "test", "a plan was made twice");
    require(first != plan(shard(1), "alltoall") && first != plan(shard(0), "allgather"), "test", "another layout got the same plan");
    require(first->group && first->own.length() == 3 && !plan(shard(0), "allgather")->group, "test", "a plan is wrong");
  }));
}

}  // namespace dtensor::test::experts
