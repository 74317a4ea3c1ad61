// Views that keep the row-major sequence of the elements: view, squeeze and their like. See view_reshape.hpp for the algebra.
#include "src/rules/reshaped.hpp"
#include "ops/view_dims.hpp"
#include "ops/view_reshape.hpp"
#include "ops/view_strided.hpp"

#include <ATen/TensorUtils.h>

namespace dtensor::rules {

namespace {

class ReshapeRule : public Rule {
 public:
  explicit ReshapeRule(bool copies) : copies_(copies) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    if (call.operands.size() != 1 || call.outputs.size() != 1) return {};
    const auto reshape = reshape_before(call, mesh_dim);
    const auto parts = call.mesh.size(mesh_dim);
    const auto& now = call.chosen[0][mesh_dim];
    Candidates result;
    if (now.is_partial()) result.push_back({{now}, {now}});
    auto offer = [&](const Placement& p) {
      if (const auto out = follow(reshape, p, parts)) result.push_back({{p}, {*out}});
    };
    if (now.is_flat() && !call.outputs[0].sizes.empty() && detail::in_row_major_order(*call.operands[0].layout))
      result.push_back({{now}, {now}});
    if (now.is_shard()) offer(now);
    for (int64_t d = 0; d < call.operands[0].ndim(); ++d) {
      if (now != shard(d)) offer(shard(d));
    }
    for (int64_t d = 0; d < static_cast<int64_t>(call.outputs[0].sizes.size()); ++d) {
      const auto in = reshape.backward(shard(d), parts);
      if (in && *in != now && *in != shard(in->dim)) offer(*in);
    }
    return result;
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (call.outputs.size() != 1) return {};
    const auto& whole = *resolution.in[0];
    return whole.is_flat() ? flat_view(call, resolution) : reshaped(call, resolution, detail::in_row_major_order(whole));
  }

 protected:
  Lowering reshaped(const Call& call, const Resolution& resolution, bool strict) const {
    return Reshaped{local_output_sizes(call, resolution, 0), copies_, strict};
  }

 private:
  // One part is the whole, whatever it is called.
  static std::optional<Placement> follow(const Reshape& reshape, const Placement& p, int64_t parts) {
    const auto out = reshape.forward(p, parts);
    return out || parts > 1 ? out : replicate();
  }

  // The two shapes as the mesh dimensions before `mesh_dim` have cut them.
  static Reshape reshape_before(const Call& call, int64_t mesh_dim) {
    Reshape reshape(call.operands[0].sizes(), call.outputs[0].sizes);
    for (int64_t m = 0; m < mesh_dim; ++m) {
      const auto& p = call.chosen[0][m];
      if (!p.is_shard()) continue;
      const auto parts = call.mesh.size(m);
      reshape.apply(p, *follow(reshape, p, parts), parts);
    }
    return reshape;
  }

  bool copies_;
};

// Operators that add or drop dims of length 1 do so on the parts as they are, except where a part is empty and its cut has another dim's
// name in the output, and where a dim to drop is no longer, or not yet, of length 1.
class LengthOneRule : public ReshapeRule {
 public:
  LengthOneRule(bool drops, bool copies) : ReshapeRule(copies), drops_(drops) {}

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (resolution.in[0]->is_flat()) return flat_view(call, resolution);
    const auto global = call.operands[0].sizes(), local = resolution.in[0]->local_sizes();
    if (!drops_ && added(call, local) == local_output_sizes(call, resolution, 0)) return {};
    for (size_t d = 0; d < global.size(); ++d) {
      const bool other = drops_ && (global[d] == 1) != (local[d] == 1);
      if (local[d] == 0 || other) return reshaped(call, resolution, false);  // always a view
    }
    return {};
  }

 private:
  // `local` with the new dim.
  static Sizes added(const Call& call, c10::IntArrayRef local) {
    Sizes sizes(local);
    sizes.insert(sizes.begin() + wrap_dim(call.int_arg("dim"), static_cast<int64_t>(local.size()) + 1), 1);
    return sizes;
  }

  bool drops_;
};

// _reshape_alias comes with the strides that reshape has found, and takes others as as_strided does.
class ReshapeAliasRule final : public ReshapeRule {
 public:
  using ReshapeRule::ReshapeRule;

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    return reshapes(call) ? ReshapeRule::candidates(call, mesh_dim) : strided_.candidates(call, mesh_dim);
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    return reshapes(call) ? ReshapeRule::lower(call, resolution) : strided_.lower(call, resolution);
  }

 private:
  static bool reshapes(const Call& call) {
    const auto& layout = *call.operands[0].layout;
    const auto size = call.ints_arg("size"), stride = call.ints_arg("stride");
    const auto count = c10::multiply_integers(size);
    if (size.size() != stride.size() || count != c10::multiply_integers(layout.sizes())) return false;
    const auto found = at::detail::computeStride(layout.sizes(), layout.strides(), at::DimVector(size.begin(), size.end()));
    bool same = found.has_value();
    for (size_t d = 0; same && d < size.size(); ++d) same = size[d] == 1 || stride[d] == (*found)[d];
    return same || count == 0;
  }

  AsStridedRule strided_;
};

constexpr auto kWhySequence = "the sequence of elements stays; a cut in whole blocks of it has a name in both shapes";
constexpr auto kWhyOne = "dims of length 1 do not order elements";

const Register view("aten::view aten::_unsafe_view", std::make_shared<ReshapeRule>(false), kWhySequence);
const Register view_copy("aten::view_copy aten::_reshape_copy", std::make_shared<ReshapeRule>(true), kWhySequence);
const Register reshape_alias("aten::_reshape_alias", std::make_shared<ReshapeAliasRule>(false), kWhySequence);
const Register reshape_alias_copy("aten::_reshape_alias_copy", std::make_shared<ReshapeAliasRule>(true), kWhySequence);
const Register squeeze("aten::squeeze", std::make_shared<LengthOneRule>(true, false), kWhyOne);
const Register squeeze_copy("aten::squeeze_copy", std::make_shared<LengthOneRule>(true, true), kWhyOne);
const Register unsqueeze("aten::unsqueeze", std::make_shared<LengthOneRule>(false, false), kWhyOne);
const Register unsqueeze_copy("aten::unsqueeze_copy", std::make_shared<LengthOneRule>(false, true), kWhyOne);

}  // namespace

}  // namespace dtensor::rules
