// Tries an operator on stand-ins for its operands. So a wrong call throws libtorch's own error, before anything is communicated. This is
// for operators without a meta kernel, and for what only kernels check, such as dtypes.
#include "src/dispatch/decide.hpp"
#include "src/dispatch/out_form.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/base/error.hpp>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace dtensor::dispatch {

namespace {

constexpr int64_t kMostElements = 1 << 13;

// Values that operators commonly accept. An operator that throws for all of them throws for the shapes or dtypes.
enum class Values { zeros, ones, identity };

// -- Integers --------------------------------------------------------------------------------------------------------------

// An integer may be a position, a length or a pointer, and lead a kernel outside of its operands. So a call with integers is rehearsed only
// if its operator just computes with them, or is known to stay inside with the first position, for all sizes (`opcheck --rehearse` under
// valgrind).

// Families of rules whose operators compute with integers as with other numbers.
const std::unordered_set<std::string_view> kComputing{
    "copy", "foreach",         "join", "matmul",        "padding",      "pointwise",   "reduction", "shuffle", "softmax",
    "sort", "tensor_creation", "view", "view_backward", "view_flatten", "view_scatter"};
// Operators that take position 0 of any dim: they check it, or write nothing where there is none.
const std::unordered_set<std::string_view> kFirstPosition{
    "aten::index_select", "aten::gather",         "aten::scatter",         "aten::scatter_",         "aten::scatter_add",
    "aten::scatter_add_", "aten::scatter_reduce", "aten::scatter_reduce_", "aten::index_add",        "aten::index_add_",
    "aten::index_reduce", "aten::index_reduce_",  "aten::index_copy",      "aten::index_copy_",      "aten::index_fill",
    "aten::index_fill_",  "aten::index",          "aten::index_put",       "aten::index_put_",       "aten::take",
    "aten::put",          "aten::put_",           "aten::embedding",       "aten::nll_loss_forward", "aten::nll_loss2d_forward",
    "aten::bucketize",    "aten::isin",
};
// Operators whose pivots count from 1.
const std::unordered_set<std::string_view> kPivots{"aten::linalg_lu_solve", "aten::linalg_ldl_solve", "aten::lu_unpack"};

// Operators that do not look at the sizes of their operands, and read past one that is too short.
const std::unordered_set<std::string_view> kUnchecked{
    "aten::_compute_linear_combination", "aten::_fft_c2r",              "aten::_pdist_backward",
    "aten::_reshape_alias_copy",         "aten::fractional_max_pool2d", "aten::fractional_max_pool3d",
    "aten::replication_pad3d_backward",  "aten::to_sparse_bsc",         "aten::to_sparse_bsr",
};

enum class Integers { computed, first, pivots, unknown };

Integers integers_of(const c10::FunctionSchema& schema) {
  const auto* entry = rules::find_entry(schema);
  if (entry && kComputing.count(entry->family)) return Integers::computed;
  if (kFirstPosition.count(schema.name())) return Integers::first;
  return kPivots.count(schema.name()) ? Integers::pivots : Integers::unknown;
}

bool is_integer(c10::ScalarType dtype) { return c10::isIntegralType(dtype, /*includeBool=*/false); }

bool has_integers(const rules::Call& call) {
  return std::ranges::any_of(call.operands, [](const auto& operand) { return is_integer(operand.layout->dtype()); });
}

// -- Stand-ins -------------------------------------------------------------------------------------------------------------

int value_of(c10::ScalarType dtype, Values values, Integers integers) {
  if (!is_integer(dtype) || integers == Integers::computed) return values == Values::ones ? 1 : 0;
  return integers == Integers::pivots ? 1 : 0;
}

at::Tensor stand_in(const at::Tensor& tensor, Values values, Integers integers) {
  if (!tensor.defined()) return tensor;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += std::max<int64_t>(tensor.sizes()[d] - 1, 0) * tensor.strides()[d];
  auto copy = at::full({last + 1}, value_of(tensor.scalar_type(), values, integers), at::TensorOptions(tensor.scalar_type()))
                  .as_strided(tensor.sizes(), tensor.strides());
  const bool matrices = tensor.dim() >= 2 && tensor.numel() > 0 && tensor.is_floating_point();
  if (values == Values::identity && matrices) copy.diagonal(0, -2, -1).fill_(1);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// What the operator says of stand-ins; empty: it takes them.
std::string complaint(const c10::OperatorHandle& op, const rules::Call& call, Values values) {
  LocalMode local;
  Stack stack;
  const auto integers = integers_of(call.schema);
  for (const auto& argument : call.arguments) {
    stack.push_back(with_tensors(argument, [&](const at::Tensor& tensor) { return stand_in(tensor, values, integers); }));
  }
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

bool is_random(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return op.hasTag(at::Tag::nondeterministic_seeded) ||
         std::ranges::any_of(arguments, [](const auto& a) { return a.name() == "generator"; });
}

int64_t elements(const rules::Call& call) {
  int64_t count = 0;
  const auto add = [&](c10::IntArrayRef sizes) {
    int64_t n = 1;
    for (const auto size : sizes) n = std::min(n * size, 2 * kMostElements);
    count = std::min(count + n, 2 * kMostElements);
  };
  for (const auto& operand : call.operands) add(operand.sizes());
  for (const auto& output : call.outputs) add(output.sizes);
  return count;
}

}  // namespace

bool selects_by_mask(const rules::Call& call) {
  const auto& name = call.schema.name();
  const int selector = name.rfind("aten::masked_s", 0) == 0 ? call.argument_index("mask") : call.argument_index("indices");
  return std::ranges::any_of(call.operands, [selector](const rules::Operand& operand) {
    const auto dtype = operand.layout->dtype();
    return operand.argument == selector && (dtype == c10::ScalarType::Bool || dtype == c10::ScalarType::Byte);
  });
}

bool rehearse(const c10::OperatorHandle& op, const rules::Call& call) {
  if (is_out_form(call.schema)) return false;  // some kernels write past an `out` of another size
  const bool custom = call.schema.name().rfind("aten::", 0) != 0;  // what others' operators do besides computing is theirs to say
  if (custom || call.mesh.device_type() != c10::DeviceType::CPU || is_random(op)) return false;
  if (kUnchecked.count(call.schema.name())) return false;
  if (call.schema.name().rfind("aten::as_strided", 0) == 0) return false;  // its offset counts from where the memory begins
  if (has_integers(call) && integers_of(call.schema) == Integers::unknown) return false;
  const bool counts_selected = selects_by_mask(call) && call.has("values");  // as many values as the mask has true elements
  if (counts_selected || elements(call) > kMostElements) return false;
  const auto words = complaint(op, call, Values::zeros);
  if (words.empty() || complaint(op, call, Values::ones).empty() || complaint(op, call, Values::identity).empty()) return true;
  fail(call.schema.name(), "{}; got {}", words, describe(call));
}

}  // namespace dtensor::dispatch
