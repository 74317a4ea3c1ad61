// Messages from one mesh to another: each rank gets its shard, for any layouts and sizes of the two meshes, and numbers come as they are.
#include "tests/support/core_support.hpp"

#include <dtensor/redistribute/channel.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ATen.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

const std::vector<Placement> kChoices{replicate(), shard(0), shard(1), strided_shard(0, 2), ragged_shard(1, {2, 1})};

// This rank's shard of `whole` under a layout of its mesh.
at::Tensor shard_of(const at::Tensor& whole, const LayoutPtr& layout) {
  return distribute_tensor(whole, layout->mesh(), layout->placements()).to_local();
}

void check_channel(const DeviceMesh& from, const DeviceMesh& to) {
  if (!from.contains_this_rank() && !to.contains_this_rank()) return;
  const MeshChannel channel(from, to);
  const auto whole = at::arange(24, at::kDouble).view({4, 6});
  std::vector<comm::WorkPtr> works;
  const auto keep = [&](std::vector<comm::WorkPtr> more) { works.insert(works.end(), more.begin(), more.end()); };
  for (const auto& a : kChoices) {
    for (const auto& b : kChoices) {
      if ((a.shares && from.size() != 2) || (b.shares && to.size() != 2)) continue;
      const auto before = Layout::get(from, {a}, whole.sizes(), at::kDouble), after = Layout::get(to, {b}, whole.sizes(), at::kDouble);
      const std::vector<int64_t> numbers{1, -5, static_cast<int64_t>(a.dim) + 7};
      if (from.contains_this_rank()) {
        keep(channel.send_numbers(numbers));
        keep(channel.send_numbers({}));
        keep(channel.send(shard_of(whole, before), before, after));
      } else {
        require(channel.receive_numbers() == numbers && channel.receive_numbers().empty(), "test", "other numbers came");
        const auto got = channel.receive(before, after).get();
        require(got.equal(shard_of(whole, after)), "test", "{} to {}: another shard came", before->str(), after->str());
      }
    }
  }
  for (const auto& work : works) work->wait();
}

}  // namespace

TEST_CASE("channels between meshes: every rank gets its shard", "[redistribute]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        5,
        [](World&) {
          const DeviceMesh two(at::kCPU, {0, 1}, {2}, {"a"}), other(at::kCPU, {2, 3}, {2}, {"a"}), three(at::kCPU, {2, 3, 4}, {3}, {"a"});
          check_channel(two, other);
          check_channel(other, two);
          check_channel(three, two);  // of another size
          check_channel(two, three);
        },
        transport));
  }
}

TEST_CASE("channels between meshes: what they refuse", "[redistribute][errors]") {
  const Alone alone(4);
  const DeviceMesh one(at::kCPU, {0, 1}, {2}, {"a"}), overlapping(at::kCPU, {1, 2}, {2}, {"a"}), far(at::kCPU, {2}, {1}, {"a"});
  CHECK_THROWS_WITH(MeshChannel(one, overlapping), says("the meshes share ranks"));
  CHECK_THROWS_WITH(MeshChannel(far, DeviceMesh(at::kCPU, {3}, {1}, {"a"})), says("this rank is in neither mesh"));
  const MeshChannel channel(one, far);
  const auto before = Layout::get(one, {shard(0)}, {4, 2}, at::kFloat), after = Layout::get(far, {replicate()}, {4, 2}, at::kFloat);
  CHECK_THROWS_WITH(channel.send(at::zeros({3, 2}), before, after), says("does not fit its layout"));
  CHECK_THROWS_WITH(channel.receive(before, after), says("this rank receives nothing"));
}
