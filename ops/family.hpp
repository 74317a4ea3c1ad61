// Rules from the index structure of a call: for operators whose structure depends on their arguments (reduced dims, a
// concatenated dim, ...), where the fixed notation of rules::einsum cannot say it.
#pragma once

#include "ops/pointwise.hpp"

#include <dtensor/rules/rule.hpp>

#include <c10/util/SmallVector.h>

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

namespace dtensor::rules {

constexpr int kWhole = -1;  // no letter: the dim is never cut

// A dim as a rule sees it. Cutting a letter cuts every dim that bears it, in all operands and outputs.
struct Dim {
  int letter = kWhole;
  int64_t size = 1;
  int64_t block = 1;  // elements per one of the letter's: [channels, kernel] as one dim has blocks of a kernel's size
};
using Dims = c10::SmallVector<Dim, 6>;

// How the dims of operands and outputs correspond.
struct Structure {
  std::vector<Dims> in;   // per operand
  std::vector<Dims> out;  // per output
  // Per output, its placement where a letter that it lacks is cut; empty: such letters are not cut.
  Placements lacking = {};
  // Partial operands that pass through. Indices are of operands; an empty `together` means all of them. Of an operator that converts its first
  // operand to its argument dtype, those that the conversion keeps.
  KeepsPartial keeps = {};
  std::vector<int> unread = {};  // operands whose values do not matter: they stay as they are
  std::vector<int> shapes = {};  // operands of which only the sizes matter: pending ones stay so
  // Of outputs that libtorch does not describe: strides where they are not row-major, the dtype where it is not the first operand's, and which
  // are undefined or not known in all.
  std::vector<Sizes> strides = {};
  std::optional<at::ScalarType> dtype = {};
  std::vector<int> undefined = {};
  std::vector<int> open = {};  // see OutputMeta
  // Each element is treated alike: where all operands but single numbers are flat in one way, outputs are too, or `lacking`.
  bool elementwise = false;
  // Letters whose cut makes the lowering communicate, and how many bytes per rank.
  std::vector<std::pair<int, int64_t>> lowering_bytes = {};
};

using StructureOf = std::function<Structure(const Call&)>;
using LoweringOf = std::function<Lowering(const Call&, const Resolution&)>;

// Who knows the outputs' sizes and strides: libtorch's meta kernel, where there is one, or the structure (for operators whose
// meta kernel is not of a mind with the others).
enum class Outputs { of_kernel, of_structure };

// The rule that offers every cut of every letter, and what `keeps` says.
RulePtr family(StructureOf structure, LoweringOf lower = {}, Outputs outputs = Outputs::of_kernel);

// Whole operands, whole results.
RulePtr replicated();

// -- Parts of structures ----------------------------------------------------------------------------------------------

// A dim counted from the end if negative, as a position; 0 for tensors without dims. Throws, as libtorch does, where there is none.
int64_t wrap_dim(int64_t dim, int64_t ndim);

// The dims that argument `name` holds, as positions; all dims when it is absent, None or an empty list.
std::vector<int64_t> dims_arg(const Call& call, std::string_view name, int64_t ndim);

// Letters first, first + 1, ... for the dims of a tensor.
Dims lettered(c10::IntArrayRef sizes, int first = 0);
Dims without_letters(c10::IntArrayRef sizes);

// Of a call that makes no sense: whole operands, so that the kernel says what is wrong.
Structure senseless(const Call& call);

// Dims of tensors that broadcast against each other: letters by distance from the right; a dim of size 1 that is
// stretched bears none.
std::vector<Dims> broadcast(const Call& call, c10::ArrayRef<int> operands, Dims& result);

// Reductions that pass through a conversion of dtypes.
std::vector<ReduceOp> kept_by_conversion(at::ScalarType from, at::ScalarType to);

// Reductions that pass where some elements are replaced by a number: of equal values, and any of zeros.
inline std::vector<ReduceOp> kept_by_number(const at::Scalar& value) {
  return value.equal(0) ? kAnyPartial : kOfEqualValues;
}

// In the type that kernels compute in: of half precision, float.
at::Tensor widened(const at::Tensor& tensor);

// Whether a dim of the operand is cut by any mesh dimension.
bool is_cut(const LayoutPtr& layout, int64_t dim);
bool is_cut(const LayoutPtr& layout, c10::ArrayRef<int64_t> dims);

// The mesh dimensions of more than one rank that cut the dim, or any dim.
std::vector<int64_t> cutting(const LayoutPtr& layout, int64_t dim);
std::vector<int64_t> cutting(const LayoutPtr& layout);

// The placement of flat members (indices into call.operands) on a mesh dimension, if all members but single numbers can lie so: it is the
// first flat one's, and their sizes and strides are equal, as are those of `outputs`.
std::optional<Placement> common_flat(const Call& call, int64_t mesh_dim, const std::vector<int>& members, c10::ArrayRef<OutputMeta> outputs = {});

// Elements of an operand's largest local part as placements are chosen so far, not counting the cuts of `dim`, and `dim` itself.
int64_t slices(const Call& call, int operand, int64_t dim);

// Positions in this rank's part of a dim, of which it has the intervals `held`; `elsewhere` for those that it has not.
at::Tensor own_rows(const at::Tensor& positions, const Intervals& held, int64_t elsewhere);

// Throws unless all positions are in [0, length), in libtorch's `words` for it ("{}": one that is not). Not checked on accelerators,
// where it would have to wait.
void check_positions(std::string_view op, const at::Tensor& positions, int64_t length, std::string_view words = "index out of range");

// Strides of a tensor of `sizes` in channels-last order if `like` is in that order, else row-major.
Sizes strides_like(c10::IntArrayRef sizes, const Layout& like);
bool is_channels_last(const Layout& layout);

// The layout of output `i`, and whether this rank has none of a tensor.
LayoutPtr output_layout(const Call& call, const Resolution& resolution, size_t i);
bool is_empty(c10::IntArrayRef sizes);

// Most kernels refuse empty tensors. On a rank where an operand or a result is empty, all results are zeros of the right
// sizes; elsewhere `otherwise` is the lowering.
Lowering zeros_of_nothing(const Call& call, const Resolution& resolution, Lowering otherwise = {});

// Operators that treat every slice along some dims by itself: the dims that `along` names are whole, others are free,
// and outputs have the shape of the operands.
RulePtr sliced(std::function<std::vector<int64_t>(const Call&)> along, KeepsPartial keeps = {});
// The same with the dims named by an argument.
RulePtr sliced(std::string_view argument, KeepsPartial keeps = {});

}  // namespace dtensor::rules
