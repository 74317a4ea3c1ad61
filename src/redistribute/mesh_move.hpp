// A move of a tensor from one mesh to another as this rank sees it: a plan, and where its boxes lie in this rank's shards.
#pragma once

#include <dtensor/comm/work.hpp>
#include <dtensor/redistribute/between_meshes.hpp>
#include <dtensor/redistribute/boxes_of_shard.hpp>

#include <memory>
#include <optional>
#include <vector>

namespace dtensor::redistribute {

class MeshMove {
 public:
  // Plans are kept for each pair of layouts. Throws as plan_move_between.
  static std::shared_ptr<const MeshMove> find(const LayoutPtr& from, const LayoutPtr& to);
  MeshMove(const Layout& from, const Layout& to);
  ~MeshMove();

  const MeshMovePlan& plan() const { return plan_; }
  bool has_before() const { return before_ != nullptr; }                    // this rank has a shard
  bool has_after() const { return after_ != nullptr; }                      // this rank gets one
  const std::vector<int64_t>& send_counts() const { return send_counts_; }  // elements, by position in plan().ranks
  const std::vector<int64_t>& receive_counts() const { return receive_counts_; }

  // What leaves, in the order of the peers: without a copy where it is all of a contiguous tensor and `may_share`.
  at::Tensor outgoing(const at::Tensor& local, const at::TensorOptions& options, bool may_share = false) const;

  // This rank's shard under `to`, with what it had already. `local` is not read where nothing is kept.
  at::Tensor with_kept(const at::Tensor& local, const Layout& to, const at::TensorOptions& options) const;

  // Puts what came, in the order of the peers, in its place in `result`. The move lives until then.
  static comm::Async unpack(const std::shared_ptr<const MeshMove>& move, comm::Async received, const at::Tensor& result);
  void put(const at::Tensor& received, const at::Tensor& result) const;

 private:
  MeshMovePlan plan_;
  std::vector<ShardPiece> sent_, received_, kept_, kept_at_;
  std::vector<int64_t> send_counts_, receive_counts_;
  std::unique_ptr<const BoxesOfShard> before_, after_;  // null: this rank has none
  std::optional<int> identity_;                         // see identity_of()
};

// Throws unless `local` is this rank's shard under the layout, by sizes and dtype.
void check_local(const at::Tensor& local, const Layout& layout);

}  // namespace dtensor::redistribute
