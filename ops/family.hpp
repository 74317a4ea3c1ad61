// Rules from the index structure of a call. For operators whose structure depends on their arguments (reduced dims, a concatenated
// dim, ...), which the fixed notation of rules::einsum cannot express.
#pragma once

#include "ops/pointwise.hpp"

#include <dtensor/rules/rule.hpp>

#include <c10/util/SmallVector.h>

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

namespace dtensor::rules {

constexpr int kWhole = -1;  // no letter: the dim is never sharded

// A dim as a rule sees it. Sharding a letter shards every dim with that letter, in all operands and outputs.
struct Dim {
  int letter = kWhole;
  int64_t size = 1;
  int64_t block = 1;  // indices of the dim per index of the letter: [channels, kernel] as one dim has blocks of the kernel's size
};
using Dims = c10::SmallVector<Dim, 6>;

// How the dims of operands and outputs correspond.
struct Structure {
  std::vector<Dims> in;   // per operand
  std::vector<Dims> out;  // per output
  // Per output, its placement where a letter that it lacks is sharded. Empty: such letters are not sharded.
  Placements lacking = {};
  // Partial operands that pass through. Indices are of operands; an empty `together` means all of them. If the operator converts its
  // first operand to its argument dtype, only what the conversion keeps passes.
  KeepsPartial keeps = {};
  std::vector<int> unread = {};  // operands whose values do not matter: they are not moved
  std::vector<int> shapes = {};  // operands of which only the sizes matter: pending ones are not reduced
  // For outputs that libtorch does not describe: strides that are not row-major, a dtype that is not the first operand's, and which outputs
  // are undefined or not known completely.
  std::vector<Sizes> strides = {};
  std::optional<at::ScalarType> dtype = {};
  std::vector<int> undefined = {};
  std::vector<int> open = {};  // see OutputMeta
  // The operator treats all elements alike: if all operands but single numbers have one flat placement, so have the outputs, or `lacking`.
  bool elementwise = false;
  // Letters that make the lowering communicate when they are sharded, and how many bytes per rank.
  std::vector<std::pair<int, int64_t>> lowering_bytes = {};
};

using StructureOf = std::function<Structure(const Call&)>;
using LoweringOf = std::function<Lowering(const Call&, const Resolution&)>;

// Where the outputs' sizes and strides come from: libtorch's meta kernel, where there is one, or the structure (for operators whose
// meta kernel does not agree with their other kernels).
enum class Outputs { of_kernel, of_structure };

// The rule that offers every cut of every letter, and the Partial combinations of `keeps`.
RulePtr family(StructureOf structure, LoweringOf lower = {}, Outputs outputs = Outputs::of_kernel);

// The rule for operators that run on replicated operands only.
RulePtr replicated();

// -- Parts of structures ----------------------------------------------------------------------------------------------

// The position of a dim that counts from the end if negative; 0 for tensors without dims. Throws as libtorch does if it is out of range.
int64_t wrap_dim(int64_t dim, int64_t ndim);

// The dims that argument `name` holds, as positions; all dims when it is absent, None or an empty list.
std::vector<int64_t> dims_arg(const Call& call, std::string_view name, int64_t ndim);

// Letters first, first + 1, ... for the dims of a tensor.
Dims lettered(c10::IntArrayRef sizes, int first = 0);
Dims without_letters(c10::IntArrayRef sizes);

// For a call that makes no sense: whole operands, so that the kernel throws its own error.
Structure senseless(const Call& call);

// Dims of tensors that broadcast against each other. Letters count from the right; a dim of size 1 that is stretched has none.
std::vector<Dims> broadcast(const Call& call, c10::ArrayRef<int> operands, Dims& result);

// Reductions that pass through a conversion of dtypes.
std::vector<ReduceOp> kept_by_conversion(at::ScalarType from, at::ScalarType to);

// Reductions that stay pending when some elements are replaced by a number: those that keep equal values, and any for zeros.
inline std::vector<ReduceOp> kept_by_number(const at::Scalar& value) {
  return value.equal(0) ? kAnyPartial : kOfEqualValues;
}

// The tensor in the type that kernels compute in: float for half precision.
at::Tensor widened(const at::Tensor& tensor);

// Whether any mesh dimension shards the dim.
bool is_cut(const LayoutPtr& layout, int64_t dim);
bool is_cut(const LayoutPtr& layout, c10::ArrayRef<int64_t> dims);

// The mesh dimensions of more than one rank that shard the dim, or any dim.
std::vector<int64_t> cutting(const LayoutPtr& layout, int64_t dim);
std::vector<int64_t> cutting(const LayoutPtr& layout);

// The placement of the first flat member (members are indices into call.operands) on a mesh dimension, if all members but single numbers
// can have it: their sizes and strides must be equal, and equal to those of `outputs`.
std::optional<Placement> common_flat(const Call& call, int64_t mesh_dim, const std::vector<int>& members,
                                     c10::ArrayRef<OutputMeta> outputs = {});

// The number of slices along `dim` in an operand's largest local tensor under the placements chosen so far.
int64_t slices(const Call& call, int operand, int64_t dim);

// Global positions along a dim as positions in this rank's shard, which has the intervals `held`; `elsewhere` for those of other ranks.
at::Tensor own_rows(const at::Tensor& positions, const Intervals& held, int64_t elsewhere);

// Throws unless all positions are in [0, length). `words` is libtorch's text for it ("{}": a position out of range). Accelerators are not
// checked, because the check would have to wait for them.
void check_positions(std::string_view op, const at::Tensor& positions, int64_t length, std::string_view words = "index out of range");

// Strides of a tensor of `sizes` in channels-last order if `like` is in that order, else row-major.
Sizes strides_like(c10::IntArrayRef sizes, const Layout& like);
bool is_channels_last(const Layout& layout);

// The layout of output `i`.
LayoutPtr output_layout(const Call& call, const Resolution& resolution, size_t i);
bool is_empty(c10::IntArrayRef sizes);  // no elements

// Most kernels refuse empty tensors. On a rank where an operand or a result is empty, all results are zeros of the right
// sizes; elsewhere `otherwise` is the lowering.
Lowering zeros_of_nothing(const Call& call, const Resolution& resolution, Lowering otherwise = {});

// Operators that treat every slice along some dims by itself: the dims that `along` names are whole, others may be sharded, and
// outputs have the shape of the operands.
RulePtr sliced(std::function<std::vector<int64_t>(const Call&)> along, KeepsPartial keeps = {});
// The same with the dims named by an argument.
RulePtr sliced(std::string_view argument, KeepsPartial keeps = {});

}  // namespace dtensor::rules
