// Fused scaled dot-product attention: batch and heads are independent, and so are queries as long as each sees every
// key.
#include "ops/family.hpp"

#include <dtensor/compat.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/zeros.h>

namespace dtensor::rules {
namespace {

enum : int { kBatch, kHead, kQuery };  // letters; keys and features are whole

// Query [batch, heads, queries, features], key and value [batch, key heads, keys, features], mask [.., queries, keys].
struct Attention {
  explicit Attention(const Call& call) {
    const auto q = sizes(call, "query"), k = sizes(call, "key"), v = sizes(call, "value");
    // A group of query heads shares a key head: cuts fall between groups when key heads divide evenly.
    const bool grouped = k[1] != q[1];
    const int head = !grouped || k[1] % call.mesh.size() == 0 ? kHead : kWhole;
    // A causal mask is counted from the first query.
    const int row = call.bool_arg("is_causal") ? kWhole : kQuery;
    query = {{kBatch, q[0]}, {head, q[1]}, {row, q[2]}, {kWhole, q[3]}};
    key = {{kBatch, k[0]}, {head, k[1]}, {kWhole, k[2]}, {kWhole, k[3]}};
    value = {{kBatch, v[0]}, {head, v[1]}, {kWhole, v[2]}, {kWhole, v[3]}};
    out = query;
    out[3].size = v[3];
    statistics = {query[0], query[1], query[2]};
  }

  // What an operand is, by the name of its argument.
  Dims dims(const Call& call, const Operand& operand) const {
    const auto& name = call.schema.arguments()[operand.argument].name();
    if (name == "query") return query;
    if (name == "key") return key;
    if (name == "value") return value;
    if (name == "logsumexp") return statistics;
    return name == "attn_mask" ? mask(operand) : out;
  }

  Dims query, key, value, out, statistics;

 private:
  static c10::IntArrayRef sizes(const Call& call, std::string_view name) {
    return call.operand(call.argument_index(name))->sizes();
  }

  Dims mask(const Operand& operand) const {
    auto dims = without_letters(operand.sizes());
    for (size_t d = 0; d < dims.size(); ++d) {
      const auto& under = query[4 - dims.size() + d];
      if (d + 1 < dims.size() && dims[d].size == under.size) dims[d].letter = under.letter;
    }
    return dims;
  }
};

std::vector<Dims> operands(const Call& call, const Attention& attention) {
  std::vector<Dims> in;
  for (const auto& operand : call.operands) in.push_back(attention.dims(call, operand));
  return in;
}

// The kernel's results are [batch, queries, heads, ...] in memory.
Sizes heads_inside(const Dims& dims) {
  const int64_t features = dims.size() > 3 ? dims[3].size : 1;
  Sizes strides{dims[2].size * dims[1].size * features, features, dims[1].size * features};
  if (dims.size() > 3) strides.push_back(1);
  return strides;
}

// The output's strides: since libtorch 2.5 its memory order is the query's.
Sizes output_strides(const Call& call, const Attention& attention) {
  if constexpr (!DTENSOR_TORCH_AT_LEAST(2, 5)) return heads_inside(attention.out);
  const auto& query = *call.operand(call.argument_index("query"));
  const auto strides = at::infer_dense_strides(query.sizes(), query.layout->strides());
  return Sizes(strides.begin(), strides.end());
}

Structure forward(const Call& call) {
  const Attention attention(call);
  Structure structure{operands(call, attention), {attention.out, attention.statistics}};
  structure.strides = {output_strides(call, attention), heads_inside(attention.statistics)};
  return structure;
}

Structure backward(const Call& call) {
  const Attention attention(call);
  Structure structure{operands(call, attention),
                      {attention.query, attention.key, attention.value},
                      Placements(3, partial()),
                      {kSums, {{0}}}};
  for (const auto& dims : structure.out) structure.strides.push_back(heads_inside(dims));
  return structure;
}

Sizes local_sizes(const Resolution& resolution, int operand) {
  const auto sizes = resolution.in[operand]->local_sizes();
  return Sizes(sizes.begin(), sizes.end());
}

// The kernels do not take empty tensors; a rank without queries returns nothing, or gradients of zero.
Lowering forward_of_nothing(const Call& call, const Resolution& resolution) {
  auto out = local_sizes(resolution, 0);
  if (!is_empty(out)) return {};
  const Sizes statistics(out.begin(), out.begin() + 3);
  out[3] = call.operands[2].sizes()[3];
  return [out, statistics](LocalCall& local) {
    const auto options = local.arg(0).toTensor().options();
    const auto wide = at::toOpMathType(c10::typeMetaToScalarType(options.dtype()));
    local.replace({at::zeros(out, options), at::zeros(statistics, options.dtype(wide))});
  };
}

Lowering backward_of_nothing(const Call&, const Resolution& resolution) {
  if (!is_empty(local_sizes(resolution, 1))) return {};
  const std::vector<Sizes> gradients{local_sizes(resolution, 1), local_sizes(resolution, 2), local_sizes(resolution, 3)};
  return [gradients](LocalCall& local) {
    const auto options = local.arg(0).toTensor().options();
    local.replace({at::zeros(gradients[0], options), at::zeros(gradients[1], options), at::zeros(gradients[2], options)});
  };
}

const Register attention("aten::_scaled_dot_product_flash_attention_for_cpu", family(forward, forward_of_nothing),
                         "batch, heads and queries are independent");
const Register gradient("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                        family(backward, backward_of_nothing),
                        "linear in the incoming gradient; gradients of keys and values sum over queries");

}  // namespace
}  // namespace dtensor::rules
