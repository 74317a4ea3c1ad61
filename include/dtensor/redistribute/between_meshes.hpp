// Moving a tensor between two meshes, whose ranks may be the same, overlap or be others: who gives whom what.
#pragma once

#include <dtensor/comm/work.hpp>
#include <dtensor/mesh/layout.hpp>

#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

// Elements that one rank gives another, or itself: a box of global indices, one interval per dim.
struct Transfer {
  int from = 0, to = 0;  // world ranks
  std::vector<Interval> box;

  int64_t numel() const;
};

// A move between two meshes as one rank sees it.
struct MeshMovePlan {
  std::vector<int> ranks;          // of both meshes, ascending: who takes part
  std::vector<Transfer> sent;      // by this rank, by receiver
  std::vector<Transfer> received;  // by this rank, by sender
  std::vector<Transfer> kept;      // what this rank has before and after
  bool communicates = false;       // whether any rank lacks something

  std::string str() const;  // "sends 6 to rank 2, 6 to rank 3; receives nothing; keeps 0"
};

// What the calling rank sends, receives and keeps when a tensor moves from one layout to another, on any two meshes of one world. Every
// element that a rank lacks comes once, what a rank has stays, and ranks that have the same send the same amount, to one element. Each rank
// works its own part out from the layouts; nothing is communicated. Plans are cached. Where `to` is a pending sum or product, the mesh
// dimension's first rank gets the values and the others hold zeros or ones. Throws where the layouts are of two tensors, worlds or kinds of
// device, where `from` is Partial, and where `to` is P(norm2).
MeshMovePlan plan_move_between(const LayoutPtr& from, const LayoutPtr& to);

// Runs the plan: every rank of both meshes calls it, `local` being its part under `from`, undefined where it has none. The result is its
// part under `to`, undefined likewise. One all_to_all of the ranks of both meshes, in exact numbers, and none where no rank lacks anything.
// Shares no memory with `local`, which may be written at once.
comm::Async move_local_between(const at::Tensor& local, const LayoutPtr& from, const LayoutPtr& to);

}  // namespace dtensor

#pragma GCC visibility pop
