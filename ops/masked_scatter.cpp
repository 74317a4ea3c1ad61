// Scattering by a mask. The place of an element depends on the whole mask, so every rank needs it whole.
#include "ops/family.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <range/v3/numeric/iota.hpp>

#include <algorithm>

namespace dtensor::rules {
namespace {

// self.masked_scatter(mask, source): the n-th true element takes the n-th of source, so every rank needs the whole mask
// and source, but writes its own shard only. Self and mask broadcast against each other.
class MaskedScatter final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const auto& self = call.operands[0];
    const auto& now = self.placements()[mesh_dim];
    if (now.is_partial()) return {{{now, replicate(), now}, {now}}};  // elements only move
    if (!now.is_shard()) return {};
    const auto result = result_sizes(call);
    const auto dim = now.dim + static_cast<int64_t>(result.size()) - self.ndim();
    if (result[dim] != self.sizes()[now.dim]) return {};
    return {{{now, replicate(), replicate()}, {shard(dim, now.cut())}}};
  }

  std::vector<Sizes> output_sizes(const Call& call) const override { return {result_sizes(call)}; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const auto& self = *resolution.in[0];
    const auto result = result_sizes(call);
    const auto leading = static_cast<int64_t>(result.size()) - self.ndim();
    Placements cuts;
    for (const auto& p : self.placements()) cuts.push_back(p.is_shard() ? shard(p.dim + leading, p.cut()) : replicate());
    if (std::ranges::none_of(cuts, [](const Placement& p) { return p.is_shard(); })) return {};
    const auto layout = Layout::get(call.mesh, cuts, result, call.in_place ? self.strides() : contiguous_strides(result), self.dtype());
    return [layout, in_place = call.in_place](LocalCall& local) {
      const auto self = local.arg(0).toTensor(), source = local.arg(2).toTensor();
      const auto mask = local.arg(1).toTensor().expand(layout->sizes()).contiguous();
      const auto rank = places_in_source(mask, in_place && goes_through_memory() ? layout->strides() : mask.strides());
      const auto own_mask = own_shard(mask, *layout), own_rank = own_shard(rank, *layout);
      auto result = self.expand(own_mask.sizes());
      if (source.numel() > 0) {
        require(rank.numel() == 0 || rank.max().item<int64_t>() < source.numel(), "aten::masked_scatter",
                "the mask has more true elements than source has elements; got {}", source.numel());
        const auto values = source.reshape({-1}).index_select(0, own_rank.reshape({-1})).view(own_mask.sizes());
        result = at::where(own_mask, values, result);
      }
      local.replace({in_place ? self.copy_(result) : result.clone()});
    };
  }

 private:
  // Whether libtorch takes the elements in the order of self's memory, as versions before 2 do.
  static bool goes_through_memory() {
    static const bool found = [] {
      const auto values = at::arange(4).view({2, 2});
      return !at::zeros({2, 2}, at::kLong).t().masked_scatter_(at::ones({2, 2}, at::kBool), values).equal(values);
    }();
    return found;
  }

  static Sizes result_sizes(const Call& call) {
    Dims dims;
    broadcast(call, {0, 1}, dims);
    Sizes sizes;
    for (const auto& dim : dims) sizes.push_back(dim.size);
    return sizes;
  }

  // How many true elements come before each, when elements are counted by descending stride.
  static at::Tensor places_in_source(const at::Tensor& mask, c10::IntArrayRef strides) {
    std::vector<int64_t> order(mask.dim());
    ranges::iota(order, 0);
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
    auto places = at::empty_like(mask, mask.options().dtype(at::kLong));
    const auto ordered = mask.permute(order);
    places.permute(order).copy_(ordered.reshape({-1}).cumsum(0).sub_(1).clamp_min_(0).view(ordered.sizes()));
    return places;
  }
};

const Register masked_scatter("aten::masked_scatter", std::make_shared<MaskedScatter>(),
                              "which element of source goes where depends on the whole mask; writing it does not");

}  // namespace
}  // namespace dtensor::rules
