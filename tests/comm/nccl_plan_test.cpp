// What the nccl transport decides before it calls NCCL, and who gets it: plain logic, on any machine.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/transports/nccl/plan.hpp"
#include "src/launch/devices.hpp"

#include <ATen/ATen.h>

#include <cstdlib>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using namespace dtensor::comm;
using dtensor::ReduceOp;
using S = at::ScalarType;

namespace {

bool is(const nccl::Reduction& got, nccl::Wire type, ReduceOp op, int64_t width = 1) {
  return got.type == type && got.op == op && got.width == width;
}

nccl::Reduction reduction(S dtype, ReduceOp op) { return nccl::reduction_of(Collective::all_reduce, dtype, op); }

}  // namespace

TEST_CASE("nccl plan: types and operations", "[comm][nccl]") {
  using nccl::Wire;
  for (const auto op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
    CHECK(is(reduction(S::Float, op), Wire::float32, op));
    CHECK(is(reduction(S::Double, op), Wire::float64, op));
    CHECK(is(reduction(S::Half, op), Wire::float16, op));
    CHECK(is(reduction(S::BFloat16, op), Wire::bfloat16, op));
    if (op == ReduceOp::avg) continue;
    CHECK(is(reduction(S::Long, op), Wire::int64, op));
    CHECK(is(reduction(S::Int, op), Wire::int32, op));
    CHECK(is(reduction(S::Char, op), Wire::int8, op));
    CHECK(is(reduction(S::Byte, op), Wire::uint8, op));
  }
  for (const auto op : {ReduceOp::sum, ReduceOp::max}) CHECK(is(reduction(S::Bool, op), Wire::uint8, ReduceOp::max));
  for (const auto op : {ReduceOp::product, ReduceOp::min}) CHECK(is(reduction(S::Bool, op), Wire::uint8, ReduceOp::min));
  CHECK(is(reduction(S::ComplexFloat, ReduceOp::sum), Wire::float32, ReduceOp::sum, 2));
  CHECK(is(reduction(S::ComplexDouble, ReduceOp::avg), Wire::float64, ReduceOp::avg, 2));
}

TEST_CASE("nccl plan: what NCCL does not do as others do it is refused", "[comm][nccl]") {
  CHECK(fails_with([] { reduction(S::Short, ReduceOp::sum); }, "hint: convert to int32"));
  CHECK(fails_with([] { reduction(S::QInt8, ReduceOp::sum); }, "does not reduce QInt8"));
  CHECK(fails_with([] { reduction(S::ComplexFloat, ReduceOp::product); }, "no product of complex numbers"));
  for (const auto dtype : {S::Long, S::Int, S::Char, S::Byte}) {
    CHECK(fails_with([&] { reduction(dtype, ReduceOp::avg); }, "take the sum and divide it"));
  }
  CHECK(fails_with([] { nccl::check_tag(Collective::send, 2); }, "got tag 2"));
  CHECK_NOTHROW(nccl::check_tag(Collective::send, 0));
}

TEST_CASE("nccl plan: pieces of ragged collectives", "[comm][nccl]") {
  using nccl::Piece;
  CHECK((nccl::pieces_of({3, 0, 2}) == std::vector<Piece>{{0, 0, 3}, {2, 3, 2}}));
  CHECK(nccl::pieces_of({0, 0}).empty());
  CHECK((nccl::pieces_of({0, 5, 5}) == std::vector<Piece>{{1, 0, 5}, {2, 5, 5}}));
  CHECK(nccl::are_equal({4, 4, 4}));
  CHECK_FALSE(nccl::are_equal({4, 4, 3}));
}

TEST_CASE("nccl: a rank's device is that of its number on its host", "[comm][nccl]") {
  dtensor::detail::LauncherRank rank{"torchrun", 5, 8, "a", 1};
  const auto device = [&](int devices, const char* visible = nullptr) {
    return dtensor::detail::device_of(rank, devices,
                                      [&](const char*) { return visible ? std::optional<std::string>(visible) : std::nullopt; });
  };
  CHECK_FALSE(device(4).has_value());  // its number is not known
  rank.local_rank = 1;
  CHECK(device(4) == 1);
  CHECK_FALSE(device(0).has_value());
  CHECK_FALSE(device(1).has_value());  // rank 0 of the host has it
  CHECK(device(1, "3") == 0);          // the launcher gave each its own
  rank = {"torchrun", 0, 1, "a", 1};
  CHECK(device(4) == 0);
}

TEST_CASE("nccl: refused for ranks that are threads and in builds without it", "[comm][nccl]") {
  if (has_nccl_transport()) {
    CHECK(fails_with([] { run_ranks("nccl", 2, [](dtensor::World&) {}); }, "hint: dtensor-run -n 2 ./program --transport nccl"));
    return;
  }
  CHECK_FALSE(can_use_nccl_transport());
  CHECK(fails_with([] { run_ranks("nccl", 1, [](dtensor::World&) {}); }, "hint: configure with -Dtorch_root= a libtorch with CUDA"));
}
