// Views that map dims to dims: they permute, drop, add and slice dims. The cut of a dim that the view keeps moves no elements.
#pragma once

#include "ops/family.hpp"

#include <dtensor/rules/rule.hpp>

#include <optional>

namespace dtensor::rules {

// The dim of an output that one dim of the operand becomes.
struct Image {
  int64_t dim = -1;  // of the output; -1: a cut of it has no counterpart there
  // [begin, end) of `whole` indices: a slice of the operand's dim is the output's, or (embeds) the reverse.
  int64_t whole = 0, begin = 0, end = 0;
  bool embeds = false;

  bool slices() const { return dim >= 0 && end - begin != whole; }
};
using DimMap = c10::SmallVector<Image, 5>;  // an image per dim of the operand

// The output's placement that keeps the elements of the operand's Shard `p` on their ranks; nothing when there is none.
std::optional<Placement> carry(const Placement& p, const Image& image);

// Every dim to the dim of the same number.
DimMap same_dims(int64_t ndim);

// Every dim but the `dropped` ones, closing ranks. Dropped ones have no image.
DimMap without_dims(int64_t ndim, c10::ArrayRef<int64_t> dropped);

// The arguments `name` = `value` for the local call.
using Changes = std::vector<std::pair<int, c10::IValue>>;
Lowering with_arguments(Changes changes);

// This rank's sizes of output `i`.
Sizes local_output_sizes(const Call& call, const Resolution& resolution, size_t i);

// The local call of a view that keeps all elements, of a flat operand: the same elements as a row.
Lowering flat_view(const Call& call, const Resolution& resolution);

// Which reductions pass: of all (the elements only move), of sums (they also change sign or regroup), or of none (bits).
enum class Passes { all, sums, none };

// A rule for operators with one tensor operand.
class DimRule : public Rule {
 public:
  using Maps = std::vector<DimMap> (*)(const Call&);               // a map per output
  using Lower = Lowering (*)(const Call&, const Resolution&);      // null: the local call needs no change
  using OutputSizes = std::vector<Sizes> (*)(const Call&);

  DimRule(Maps maps, Lower lower = nullptr, Passes passes = Passes::all, OutputSizes output_sizes = nullptr)
      : maps_(maps), lower_(lower), passes_(passes), output_sizes_(output_sizes) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override;
  Lowering lower(const Call& call, const Resolution& resolution) const override;
  std::vector<Sizes> output_sizes(const Call& call) const override;

 private:
  Maps maps_;
  Lower lower_;
  Passes passes_;
  OutputSizes output_sizes_;
};

}  // namespace dtensor::rules
