// as_strided and its forms. Their strides address the memory of the whole tensor, so operands must not be sharded.
#pragma once

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/alias.hpp>
#include <dtensor/rules/rule.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>

namespace dtensor::rules {

class AsStridedRule : public Rule {
 public:
  // Whole operands; elements only move.
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const auto& now = call.operands[0].placements()[mesh_dim];
    if (!now.is_partial()) return {};
    return {{Placements(call.operands.size(), now), {now}}};
  }

  // So that lower() sees, and refuses, sizes that libtorch's own kernel refuses.
  std::vector<Sizes> output_sizes(const Call& call) const override {
    if (scatters(call)) return {Sizes(call.operands[0].sizes())};
    const auto size = call.ints_arg("size");
    return {Sizes(size.begin(), size.end())};
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const auto size = call.ints_arg("size"), stride = call.ints_arg("stride");
    const int offset_argument = call.argument_index("storage_offset");
    const auto offset = offset_argument < 0 ? std::vector<int64_t>() : call.ints_arg("storage_offset");
    const auto& layout = resolution.in[0];
    const bool clones = scatters(call) && (!DTENSOR_TORCH_AT_LEAST(2, 0) ||
                                           dtensor::detail::is_expanded(*layout));  // whose memory it is then that strides count in
    const auto strides = clones ? dense_strides(*layout) : Sizes(layout->strides());
    const bool empty = c10::multiply_integers(size) == 0;  // reads nothing, wherever
    const int64_t last = reach(size, stride), most = reach(layout->sizes(), strides);
    return [layout, strides, clones, empty, last, most, offset, offset_argument](LocalCall& local) {
      // An offset counts from the start of the memory, in which a view does not lie at the start.
      const int64_t first = clones ? 0 : local.originals[0].toTensor().storage_offset();
      const int64_t start = offset.empty() || empty ? 0 : offset[0] - first;
      require(empty || (start >= 0 && start + last <= most), "as_strided",
              "would read outside of a distributed tensor's own elements; got elements at distances {} to {} from the first; "
              "expected 0 to {}; hint: take the view of the tensor that has all of the elements",
              start, start + last, most);
      const auto source = local.arg(0).toTensor();
      if (source.strides() != strides) {
        auto same = at::empty_strided(layout->sizes(), strides, source.options());
        local.arg(0) = same.copy_(source);
      }
      const int64_t before = clones ? 0 : local.arg(0).toTensor().storage_offset();
      if (offset_argument >= 0) local.arg(offset_argument) = start + before;
      local.call();
    };
  }

 private:
  static bool scatters(const Call& call) { return call.operands.size() > 1; }  // its result is as the tensor that it writes a copy of

  static Sizes dense_strides(const Layout& layout) {
    const auto dense = at::infer_dense_strides(layout.sizes(), layout.strides());
    return Sizes(dense.begin(), dense.end());
  }

  static int64_t reach(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += sizes[d] == 0 ? 0 : (sizes[d] - 1) * strides[d];
    return last;
  }
};

}  // namespace dtensor::rules
