// Messages from one mesh to another, for programs in which the ranks of one mesh do not know what those of the other are doing: stages of a
// pipeline.
#pragma once

#include <dtensor/comm/work.hpp>
#include <dtensor/mesh/layout.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// A way from one mesh to another that shares no rank with it. What is sent first is received first. Moving a tensor needs a call of send()
// on every rank of `from` and of receive() on every rank of `to`, when each of them comes to it; other ranks go on. Each rank gets what it
// lacks, once, as in a move between meshes (plan_move_between).
class MeshChannel {
 public:
  // Every rank of both meshes makes the same channels in the same order. Connects them, at once. Throws on a rank that is in neither mesh,
  // and for meshes that share ranks.
  MeshChannel(const DeviceMesh& from, const DeviceMesh& to);

  // On a rank of the mesh `from`: sends what the others lack of its shard under `before`. `after` is a layout of the same tensor on the
  // other mesh. Waits for nobody. Do not write to `local` before the works are done. Throws as plan_move_between.
  std::vector<comm::WorkPtr> send(const at::Tensor& local, const LayoutPtr& before, const LayoutPtr& after) const;

  // On a rank of the mesh `to`: this rank's shard under `after`, once its work is done; in a dry run without values, on the meta device.
  comm::Async receive(const LayoutPtr& before, const LayoutPtr& after, bool values = true) const;

  // Numbers that are the same on every rank of `from`, for every rank of `to`. receive_numbers() waits for them.
  std::vector<comm::WorkPtr> send_numbers(const std::vector<int64_t>& numbers) const;
  std::vector<int64_t> receive_numbers() const;

 private:
  int position(int rank) const;  // in the group

  DeviceMesh from_, to_;
  std::shared_ptr<comm::Communicator> group_;
};

}  // namespace dtensor

#pragma GCC visibility pop
