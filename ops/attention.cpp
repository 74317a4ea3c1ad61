// Fused scaled dot-product attention. Batch and heads are independent; queries are too, as long as each attends to every key.
#include "ops/family.hpp"

#include <dtensor/base/compat.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

namespace dtensor::rules {
namespace {

enum : int { kBatch, kHead, kQuery };  // letters; keys and features are whole

// Query [batch, heads, queries, features], key and value [batch, key heads, keys, features], mask [.., queries, keys].
struct Attention {
  // Cut along batch and heads, and along queries where the kernel's statistics are of queries alone. Where they are not, only a call
  // tells their sizes, and no rank may be without one.
  explicit Attention(const Call& call, bool by_queries = true) {
    const auto q = sizes(call, "query"), k = sizes(call, "key"), v = sizes(call, "value");
    // A group of query heads shares a key head: cuts fall between groups when key heads divide evenly.
    const bool grouped = k[1] != q[1];
    const bool heads = !grouped || k[1] % call.mesh.size() == 0;
    const int head = heads && (by_queries || all_have_some(call, 1)) ? kHead : kWhole;
    const int batch = by_queries || all_have_some(call, 0) ? kBatch : kWhole;
    // A causal mask is counted from the first query.
    const int row = by_queries && !call.bool_arg("is_causal") ? kQuery : kWhole;
    query = {{batch, q[0]}, {head, q[1]}, {row, q[2]}, {kWhole, q[3]}};
    key = {{batch, k[0]}, {head, k[1]}, {kWhole, k[2]}, {kWhole, k[3]}};
    value = {{batch, v[0]}, {head, v[1]}, {kWhole, v[2]}, {kWhole, v[3]}};
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
    if (name == "logsumexp") return statistics_of(operand);
    if (name == "attn_mask" || name == "attn_bias") return mask(operand);
    return name == "out" || name.rfind("grad_out", 0) == 0 ? out : without_letters(operand.sizes());
  }

  Dims query, key, value, out, statistics;

 private:
  // Whether no rank's shard is empty, however the mesh cuts the dim.
  static bool all_have_some(const Call& call, int dim) {
    const auto length = sizes(call, "key")[dim], ranks = call.mesh.size();
    return length % ranks == 0 || length >= ranks * ranks;
  }

  Dims statistics_of(const Operand& operand) const {  // some kernels pad them, or give them one more dim
    auto dims = without_letters(operand.sizes());
    std::copy(statistics.begin(), statistics.begin() + 2, dims.begin());
    if (dims.size() > 2 && dims[2].size == statistics[2].size) dims[2] = statistics[2];
    return dims;
  }

  static c10::IntArrayRef sizes(const Call& call, std::string_view name) { return call.operand(call.argument_index(name))->sizes(); }

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

bool is_tensor(const c10::Argument& result) { return result.type()->kind() == c10::TypeKind::TensorType; }

// Zeros that lie in memory as the whole tensor does, as what a kernel gives on other ranks.
at::Tensor zeros_in_order(c10::IntArrayRef sizes, c10::IntArrayRef strides_of_whole, const at::TensorOptions& options) {
  return at::empty_strided(sizes, at::infer_dense_strides(sizes, strides_of_whole), options).zero_();
}

// The kernels do not take empty tensors; a rank without queries returns nothing, or gradients of zero.
Lowering forward_of_nothing(const Call& call, const Resolution& resolution) {
  auto out = local_sizes(resolution, 0);
  if (!is_empty(out)) return {};
  const Sizes statistics(out.begin(), out.begin() + 3);
  out[3] = call.operands[2].sizes()[3];
  return [out, statistics, strides = call.outputs[0].strides, &schema = call.schema](LocalCall& local) {
    const auto options = local.arg(0).toTensor().options();
    const auto wide = at::toOpMathType(c10::typeMetaToScalarType(options.dtype()));
    std::vector<c10::IValue> results;
    for (const auto& result : schema.returns()) {
      const auto i = results.size();
      if (i == 0) results.emplace_back(zeros_in_order(out, strides, options));
      else if (i == 1) results.emplace_back(at::zeros(statistics, options.dtype(wide)));
      else if (is_tensor(result)) results.emplace_back(at::zeros({}, options.dtype(at::kLong)));
      else results.emplace_back(statistics[2]);
    }
    local.replace(std::move(results));
  };
}

Lowering backward_of_nothing(const Call& call, const Resolution& resolution) {
  if (!is_empty(local_sizes(resolution, 1))) return {};
  std::vector<Sizes> gradients{local_sizes(resolution, 1), local_sizes(resolution, 2), local_sizes(resolution, 3)};
  if (call.schema.returns().size() > 3) gradients.push_back(call.outputs[3].defined ? local_sizes(resolution, 4) : Sizes{});
  std::vector<bool> defined;
  std::vector<Sizes> strides;
  for (size_t i = 0; i < gradients.size(); ++i) defined.push_back(call.outputs[i].defined), strides.push_back(call.outputs[i].strides);
  return [gradients, strides, defined](LocalCall& local) {
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < gradients.size(); ++i) {
      results.emplace_back(defined[i] ? zeros_in_order(gradients[i], strides[i], local.arg(0).toTensor().options()) : at::Tensor());
    }
    local.replace(std::move(results));
  };
}

// -- Kernels of accelerators --------------------------------------------------------------------------------------------

// Nothing is cut where weights are dropped, which are drawn for the whole tensor, nor beside scales of quantized heads.
Structure whole_where_tied(const Call& call, Structure structure) {
  if (call.arg("dropout_p").toDouble() == 0 && call.argument_index("q_descale") < 0) return structure;
  for (auto* all : {&structure.in, &structure.out}) {
    for (auto& dims : *all) {
      for (auto& dim : dims) dim.letter = kWhole;
    }
  }
  structure.keeps = {};
  return structure;
}

// Besides the output, statistics of each query and what they are padded to, seeds and such.
Structure fused(const Call& call) {
  const Attention attention(call, false);
  Structure structure{operands(call, attention), {}, {}, {}};
  for (const auto& result : call.schema.returns()) {
    if (!is_tensor(result)) continue;
    const int i = static_cast<int>(structure.out.size());
    if (i > 0) structure.open.push_back(i);
    structure.out.push_back(i == 0 ? attention.out : i == 1 ? attention.statistics : Dims{});
    structure.strides.push_back(i == 0 ? output_strides(call, attention)
                                       : Sizes(structure.out.back().size(), 0));  // open ones are row-major
    structure.lacking.push_back(replicate());
  }
  return whole_where_tied(call, std::move(structure));
}

// Gradients of query, key and value, and of a bias where it is asked for.
Structure fused_backward(const Call& call) {
  const Attention attention(call, false);
  Structure structure{operands(call, attention), {attention.query, attention.key, attention.value}, {}, {kSums, {{0}}}};
  if (call.schema.returns().size() > 3) {
    const auto* bias = call.operand(call.argument_index("attn_bias"));
    structure.out.push_back(bias ? attention.dims(call, *bias) : Dims{});
    const auto asked = call.arg("grad_input_mask").toBoolList();
    for (int i = 0; i < 4; ++i) {
      if (!asked[i] || (i == 3 && !bias)) structure.undefined.push_back(i);
    }
  }
  structure.lacking = Placements(structure.out.size(), partial());
  return whole_where_tied(call, std::move(structure));
}

const Register attention("aten::_scaled_dot_product_flash_attention_for_cpu", family(forward, forward_of_nothing),
                         "batch, heads and queries are independent");
const Register gradient("aten::_scaled_dot_product_flash_attention_for_cpu_backward",
                        family(backward, backward_of_nothing),
                        "linear in the incoming gradient; gradients of keys and values sum over queries");
const Register kernels("aten::_scaled_dot_product_flash_attention aten::_scaled_dot_product_efficient_attention "
                       "aten::_scaled_dot_product_cudnn_attention",
                       family(fused, forward_of_nothing), "batch and heads are independent");
const Register kernel_gradients(
    "aten::_scaled_dot_product_flash_attention_backward aten::_scaled_dot_product_efficient_attention_backward "
    "aten::_scaled_dot_product_cudnn_attention_backward",
    family(fused_backward, backward_of_nothing), "linear in the incoming gradient; batch and heads are independent");

}  // namespace
}  // namespace dtensor::rules
