#include "tools/moves/check.hpp"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <range/v3/numeric/iota.hpp>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/enumerate.hpp>
#include <torch/csrc/autograd/autograd.h>

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <map>

namespace dtensor::moves {

namespace {

std::string name_of(const Pair& pair) {
  return pair.from->mesh().str() + " " + pair.from->str() + " -> " + pair.to->mesh().str() + " " + pair.to->str();
}

bool keeps_values(const Placement& placement) {
  return placement.is_partial(ReduceOp::avg) || placement.is_partial(ReduceOp::min) || placement.is_partial(ReduceOp::max);
}

// Whole numbers, so that every sum is exact. Different for every element.
at::Tensor values(const Layout& layout, int64_t step) {
  const auto numel = c10::multiply_integers(layout.sizes());
  return at::arange(numel, at::kLong).mul(step).add(1).to(layout.dtype()).view(layout.sizes());
}

at::Tensor part_of(const at::Tensor& whole, const Layout& layout, c10::IntArrayRef coordinate) {
  const auto elements = at::tensor(elements_of(layout, coordinate), at::kLong);
  return whole.reshape({-1}).index_select(0, elements).view(layout.local_sizes());
}

// This rank's shard of a tensor that is pending where the layout says so: the mesh dimension's last rank has what the others lack.
at::Tensor pending_part(const at::Tensor& whole, const Layout& layout) {
  const auto coordinate = layout.mesh().coordinate();
  auto part = part_of(whole, layout, coordinate);
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    const auto& placement = layout.placements()[m];
    const auto ranks = layout.mesh().size(m), i = coordinate[m];
    if (placement.is_partial(ReduceOp::sum)) part = i == ranks - 1 ? part - (ranks - 1) * 3 : at::full_like(part, 3);
    if (placement.is_partial(ReduceOp::max)) part = i == ranks - 1 ? part : part - 1;
  }
  return part;
}

Elements minus(Elements a, Elements b) {
  std::ranges::sort(a);
  std::ranges::sort(b);
  Elements rest;
  std::ranges::set_difference(a, b, std::back_inserter(rest));
  return rest;
}

// What ranks of a mesh have or want, by world rank.
std::map<int, Elements> elements_by_rank(const Layout& layout, bool wanted) {
  std::map<int, Elements> result;
  const auto& mesh = layout.mesh();
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const auto coordinate = mesh.coordinate_of(i);
    bool identity = false;
    for (int64_t m = 0; m < mesh.ndim(); ++m) {
      const auto& placement = layout.placements()[m];
      identity |= wanted && placement.is_partial() && !keeps_values(placement) && coordinate[m] > 0;
    }
    result[mesh.ranks()[i]] = identity ? Elements() : elements_of(layout, coordinate);
  }
  return result;
}

// What this rank has to send at least, and at most when its peers do their share; and what it has to receive.
struct Need {
  int64_t sends_least = 0, sends_most = 0, receives = 0;
  bool anything = false, takes_part = false;
};

Need need_of(const Pair& pair, int rank) {
  const auto owned = elements_by_rank(*pair.from, false), wanted = elements_by_rank(*pair.to, true);
  Need need;
  need.takes_part = owned.count(rank) || wanted.count(rank);
  auto mine = owned.count(rank) ? owned.at(rank) : Elements();
  std::ranges::sort(mine);
  int64_t asked = 0, alike = 0;
  for (const auto& [other, elements] : owned) alike += owned.count(rank) && minus(elements, mine).empty() && elements.size() == mine.size();
  for (const auto& [other, elements] : wanted) {
    const auto lacks = minus(elements, owned.count(other) ? owned.at(other) : Elements());
    need.anything |= !lacks.empty();
    if (other == rank) need.receives = static_cast<int64_t>(lacks.size());
    asked += static_cast<int64_t>(lacks.size() - minus(lacks, mine).size());
  }
  if (alike > 0) need.sends_least = asked / alike, need.sends_most = (asked + alike - 1) / alike;
  return need;
}

void check_traffic(const Pair& pair, const CommDebugMode& comm, int rank) {
  const auto need = need_of(pair, rank);
  const auto sent = comm.bytes() / static_cast<int64_t>(c10::elementSize(pair.from->dtype()));
  require(comm.count() == (need.anything && need.takes_part && pair.from->mesh().world().size() > 1 ? 1 : 0), "moves", "{}: got\n{}",
          name_of(pair), comm.str());
  require(sent >= need.sends_least && sent <= need.sends_most, "moves", "{}: rank {} sends {}; expected {} to {}", name_of(pair), rank,
          sent, need.sends_least, need.sends_most);
  int64_t received = 0;
  for (const auto& transfer : plan_move_between(pair.from, pair.to).received) received += transfer.numel();
  require(received == need.receives, "moves", "{}: rank {} receives {}; it lacks {}", name_of(pair), rank, received, need.receives);
}

void check_part(const at::Tensor& tensor, const at::Tensor& whole, const Pair& pair, const char* what) {
  const DTensor moved(tensor);
  if (moved.is_absent()) return;
  const auto part = moved.layout().has_partial() ? moved.redistribute(without_partial(moved.placements())) : moved;
  const auto expected = part_of(whole, part.layout(), part.mesh().coordinate());
  require(part.to_local().detach().equal(expected), "moves", "{}: other {}; got {} expected {}", name_of(pair), what,
          str(part.placements()), whole.sizes().vec());
}

}  // namespace

Elements elements_of(const Layout& layout, c10::IntArrayRef coordinate) {
  std::vector<Elements> held;
  for (const auto size : layout.sizes()) {
    held.emplace_back(size);
    ranges::iota(held.back(), 0);
  }
  const Placement* flat = nullptr;
  int64_t place = 0;
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    const auto& placement = layout.placements()[m];
    if (placement.is_flat()) flat = &placement, place = coordinate[m];
    if (!placement.is_shard()) continue;
    auto& indices = held[placement.dim];
    Elements own;
    for (const auto& part : cut(static_cast<int64_t>(indices.size()), placement, layout.mesh().size(m), coordinate[m])) {
      own.insert(own.end(), indices.begin() + part.begin, indices.begin() + part.end);
    }
    indices = std::move(own);
  }
  // A flat cut is in the order of memory.
  Sizes order(layout.ndim());
  ranges::iota(order, 0);
  if (flat) order = memory_order(layout.strides());
  const auto steps = dtensor::contiguous_strides(layout.sizes());
  Elements elements{0};
  for (const auto d : order) {
    Elements longer;
    for (const auto& [element, index] : ranges::views::cartesian_product(elements, held[d])) longer.push_back(element + index * steps[d]);
    elements = std::move(longer);
  }
  if (!flat) return elements;
  Elements own;
  for (const auto& [e, element] : ranges::views::enumerate(elements)) {
    if ((flat->offset + static_cast<int64_t>(e)) / flat->unit == place) own.push_back(element);
  }
  return own;
}

void check(const Pair& pair) {
  const auto& [from, to] = pair;
  const int rank = from->mesh().world().rank();
  const auto whole = values(*from, 7), gradient = values(*from, 5);
  // What a part has in a maximum hangs on the others.
  const bool linear = std::ranges::none_of(from->placements(), [](const Placement& p) { return p.is_partial(ReduceOp::max); });
  const bool differentiable = linear && c10::isFloatingType(from->dtype());
  const auto local = (from->is_absent() ? at::empty({0}, whole.options()) : pending_part(whole, *from)).requires_grad_(differentiable);
  const auto source = from_local(local, from->mesh(), from->placements(), from->sizes());
  at::Tensor moved;
  {
    CommDebugMode comm;
    moved = redistribute(source.tensor(), to->mesh(), to->placements());
    if (!from->has_partial() && !(from->mesh() == to->mesh())) check_traffic(pair, comm, rank);
  }
  require(DTensor(moved).mesh() == to->mesh() && DTensor(moved).is_absent() == !to->mesh().contains_this_rank(), "moves",
          "{}: another mesh", name_of(pair));
  check_part(moved, whole, pair, "values");
  if (!differentiable) return;
  const auto back = distribute_tensor(gradient, to->mesh(), without_partial(to->placements()));
  torch::autograd::backward({moved}, {back.tensor()});
  if (from->is_absent()) return;
  require(local.grad().equal(part_of(gradient, *from, from->mesh().coordinate())), "moves", "{}: another gradient", name_of(pair));
}

LayoutPtr random_layout(std::mt19937_64& random, const DeviceMesh& mesh, const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  const auto ndim = static_cast<int64_t>(sizes.size()), numel = c10::multiply_integers(sizes);
  while (true) {
    Placements placements;
    for (int64_t m = 0; m < mesh.ndim(); ++m) {
      std::vector<int64_t> shares;
      for (int64_t i = 0; i < mesh.size(m); ++i) shares.push_back(below(4));
      if (c10::sum_integers(shares) == 0) shares[0] = 1;
      const auto kind = below(ndim > 0 ? 8 : 3), d = ndim > 0 ? below(ndim) : 0;
      if (kind <= 1) placements.push_back(replicate());
      if (kind == 2) placements.push_back(partial(below(2) || dtype == at::kByte ? ReduceOp::sum : ReduceOp::max));
      if (kind == 3 || kind == 4) placements.push_back(shard(d));
      if (kind == 5) placements.push_back(strided_shard(d, 1 + below(3), 1 + below(3)));
      if (kind == 6) placements.push_back(ragged_shard(d, shares, 1 + below(2)));
      if (kind == 7) placements.push_back(flat(1 + (numel + below(5)) / mesh.size(m) + below(3), below(4)));
    }
    const bool sums = std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(ReduceOp::sum); });
    const bool others = std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(ReduceOp::max); });
    if (sums && others) continue;  // which parts of one make up the other is not this test's
    try {
      return Layout::get(mesh, placements, sizes, dtype);
    } catch (const Error&) {  // does not fit
    }
  }
}

DeviceMesh random_mesh(std::mt19937_64& random) {
  const int world = World::current().size();
  std::vector<int> ranks(world);
  ranges::iota(ranks, 0);
  if (random() % 2) std::shuffle(ranks.begin(), ranks.end(), random);
  const auto size = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(world));
  if (random() % 2) std::rotate(ranks.begin(), ranks.begin() + static_cast<int64_t>(random() % static_cast<uint64_t>(world)), ranks.end());
  ranks.resize(size);
  std::vector<int64_t> sizes;
  for (int64_t rest = size; sizes.size() < 2;) {
    std::vector<int64_t> divisors;
    for (int64_t n = 1; n <= rest; ++n) {
      if (rest % n == 0) divisors.push_back(n);
    }
    sizes.push_back(divisors[random() % divisors.size()]);
    rest /= sizes.back();
    if (sizes.size() == 2 && rest > 1) sizes.push_back(rest);
    if (rest == 1) break;
  }
  std::vector<std::string> names;
  for (size_t d = 0; d < sizes.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
  return DeviceMesh(at::kCPU, ranks, sizes, names);
}

Pair random_pair(std::mt19937_64& random) {
  std::vector<int64_t> sizes;
  for (auto dims = random() % 5; sizes.size() < dims;) sizes.push_back(static_cast<int64_t>(random() % 7));
  const auto dtype = std::vector{at::kDouble, at::kDouble, at::kFloat, at::kLong, at::kByte}[random() % 5];
  const auto first = random_mesh(random), second = random_mesh(random);
  const auto from = random_layout(random, first, sizes, dtype);
  return {from, random_layout(random, second, sizes, dtype)};
}

}  // namespace dtensor::moves
