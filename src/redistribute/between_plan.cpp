// The plan of a move between two meshes, from the boxes of elements that ranks hold.
//
// A region is what some ranks of a mesh hold alike: the regions of a layout that is not Partial cut the tensor into disjoint sets of
// elements. What a rank wants of a region that is not its own comes from the region's ranks. All that is wanted of a region, in the order
// of the ranks that want it, is dealt to its ranks in equal shares. Every element is of one region, so no other choice of senders makes the
// most loaded one send less.
#include "src/redistribute/between_plan.hpp"

#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <map>
#include <set>

namespace dtensor::redistribute {

namespace {

using Box = std::vector<Interval>;
using Boxes = std::vector<Box>;

int64_t numel(const Box& box) {
  return ranges::accumulate(box, int64_t{1}, std::multiplies<>(), &Interval::length);
}

int64_t numel(const Boxes& boxes) {
  return ranges::accumulate(boxes, int64_t{0}, std::plus<>(), [](const Box& box) { return numel(box); });
}

// The boxes of elements that are in one of either list.
Boxes common(const Boxes& first, const Boxes& second) {
  Boxes result;
  Box both;
  for (const auto& a : first) {
    for (const auto& b : second) {
      both.clear();
      for (size_t d = 0; d < a.size(); ++d) {
        both.push_back({std::max(a[d].begin, b[d].begin), std::min(a[d].end, b[d].end)});
        if (both[d].length() <= 0) break;
      }
      if (both.empty() || both.back().length() > 0) result.push_back(both);
    }
  }
  return result;
}

// The elements [part.begin, part.end) of a box, in row-major order.
Boxes part_of(const Box& box, Interval part) {
  if (part == Interval{0, numel(box)}) return {box};
  Sizes sizes;
  for (const auto& side : box) sizes.push_back(side.length());
  auto boxes = boxes_of(sizes, part);
  for (auto& each : boxes) {
    for (auto&& [side, whole] : ranges::views::zip(each, box)) side = {side.begin + whole.begin, side.end + whole.begin};
  }
  return boxes;
}

struct Region {
  Boxes boxes;
  int64_t elements = 0;
  std::vector<int> ranks;
};

// The regions of a layout, and which is whose.
struct Regions {
  explicit Regions(const Layout& layout) {
    std::map<std::vector<int64_t>, size_t> known;
    const auto& mesh = layout.mesh();
    for (int64_t i = 0; i < mesh.size(); ++i) {
      const auto coordinate = mesh.coordinate_of(i);
      const bool nothing = identity_of(layout, coordinate).has_value();
      std::vector<int64_t> key;
      for (int64_t m = 0; m < mesh.ndim() && !nothing; ++m) key.push_back(layout.placements()[m].cuts() ? coordinate[m] : 0);
      const auto [entry, is_new] = known.try_emplace(key, all.size());
      if (is_new) {
        all.emplace_back();
        if (!nothing) all.back().boxes = layout.boxes(coordinate);
        all.back().elements = numel(all.back().boxes);
      }
      all[entry->second].ranks.push_back(mesh.ranks()[i]);
      of_rank[mesh.ranks()[i]] = entry->second;
    }
  }

  static constexpr size_t kNone = -1;
  size_t of(int rank) const {
    const auto found = of_rank.find(rank);
    return found == of_rank.end() ? kNone : found->second;
  }

  std::vector<Region> all;
  std::map<int, size_t> of_rank;
};

class Deal {
 public:
  Deal(const Layout& from, const Layout& to) : owned_(from), wanted_(to), receivers_(to.mesh().ranks()) {}

  MeshMovePlan plan(int rank) {
    MeshMovePlan plan;
    const auto own = owned_.of(rank), wants = wanted_.of(rank);
    for (size_t region = 0; region < owned_.all.size(); ++region) {
      const bool gets = wants != Regions::kNone && !shared(region, wants).empty();
      if (region == own || gets) deal(region, rank, plan);
      if (region != own || !gets) continue;
      for (const auto& box : shared(region, wants)) plan.kept.push_back({rank, rank, box});
    }
    std::ranges::stable_sort(plan.sent, [](const auto& a, const auto& b) { return a.to < b.to; });
    std::ranges::stable_sort(plan.received, [](const auto& a, const auto& b) { return a.from < b.from; });
    plan.communicates = std::ranges::any_of(receivers_, [&](int receiver) { return lacks_something(receiver); });
    std::set<int> both(receivers_.begin(), receivers_.end());
    for (const auto& [sender, region] : owned_.of_rank) both.insert(sender);
    plan.ranks.assign(both.begin(), both.end());
    return plan;
  }

 private:
  // What is in an owned and in a wanted region.
  const Boxes& shared(size_t owned, size_t wanted) {
    const auto [entry, is_new] = shared_.try_emplace({owned, wanted});
    if (is_new) entry->second = common(owned_.all[owned].boxes, wanted_.all[wanted].boxes);
    return entry->second;
  }

  bool lacks_something(int receiver) {
    const auto own = owned_.of(receiver), wants = wanted_.of(receiver);
    return wanted_.all[wants].elements > (own == Regions::kNone ? 0 : numel(shared(own, wants)));
  }

  // Deals what is wanted of a region to the region's ranks, and notes what `rank` has to do with.
  void deal(size_t region, int rank, MeshMovePlan& plan) {
    const auto& owners = owned_.all[region].ranks;
    std::vector<int> receivers;
    int64_t total = 0;
    for (const int receiver : receivers_) {
      if (owned_.of(receiver) == region) continue;
      receivers.push_back(receiver);
      total += numel(shared(region, wanted_.of(receiver)));
    }
    const auto count = static_cast<int64_t>(owners.size());
    int64_t position = 0, owner = 0;
    for (const int receiver : receivers) {
      for (const auto& box : shared(region, wanted_.of(receiver))) {
        for (int64_t begin = 0, size = numel(box); begin < size;) {
          while (position == total * (owner + 1) / count) ++owner;
          const auto end = std::min(size, begin + total * (owner + 1) / count - position);
          add(owners[owner], receiver, box, {begin, end}, rank, plan);
          position += end - begin;
          begin = end;
        }
      }
    }
  }

  static void add(int from, int to, const Box& box, Interval elements, int rank, MeshMovePlan& plan) {
    if (from != rank && to != rank) return;
    for (auto& part : part_of(box, elements)) (from == rank ? plan.sent : plan.received).push_back({from, to, std::move(part)});
  }

  const Regions owned_, wanted_;
  const std::vector<int> receivers_;
  std::map<std::pair<size_t, size_t>, Boxes> shared_;
};

}  // namespace

std::optional<int> identity_of(const Layout& layout, c10::IntArrayRef coordinate) {
  std::optional<int> identity;
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    const auto& placement = layout.placements()[m];
    if (coordinate[m] == 0) continue;
    if (placement.is_partial(ReduceOp::sum)) return 0;
    if (placement.is_partial(ReduceOp::product)) identity = 1;
  }
  return identity;
}

MeshMovePlan find_plan_between(const Layout& from, const Layout& to, int rank) { return Deal(from, to).plan(rank); }

}  // namespace dtensor::redistribute
