// The rule of operators whose output elements depend on the operands' elements at the same (broadcast) position.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <vector>

namespace dtensor::rules {

// What a pending value passes through. Data movement keeps Partial of any operation. Sums and averages pass what adds them up or scales
// them by factors that cannot be infinite: a part may be zero, or have another sign than the sum, and infinity times it would be NaN.
// Extremes pass increasing operators of that operand alone, which give a number for an infinity: a part of no elements is one. Of equal
// values v the average and the extremes are v.
inline const std::vector<ReduceOp> kAnyPartial{ReduceOp::sum, ReduceOp::avg, ReduceOp::product,
                                               ReduceOp::min, ReduceOp::max, ReduceOp::norm2};
inline const std::vector<ReduceOp> kSums{ReduceOp::sum, ReduceOp::avg};
inline const std::vector<ReduceOp> kExtremes{ReduceOp::max, ReduceOp::min};
inline const std::vector<ReduceOp> kOfEqualValues{ReduceOp::avg, ReduceOp::max, ReduceOp::min};

// When an operator may run on Partial operands: those of one of `together` are Partial(op) with op in `ops`, all others
// replicated; the outputs are then Partial(op) too. `flips`: of a maximum the operator makes a minimum, and the reverse.
class KeepsPartial {
 public:
  struct Line {
    std::vector<ReduceOp> ops;
    std::vector<std::vector<int>> together;
    bool flips = false;
  };

  KeepsPartial() = default;
  KeepsPartial(std::vector<ReduceOp> ops, std::vector<std::vector<int>> together, bool flips = false)
      : lines_{{std::move(ops), std::move(together), flips}} {}

  // What either passes through.
  friend KeepsPartial operator|(KeepsPartial a, const KeepsPartial& b) {
    a.lines_.insert(a.lines_.end(), b.lines_.begin(), b.lines_.end());
    return a;
  }

  // The combinations for operands that lie as `now` on one mesh dimension: those of a line in which some operand is Partial.
  // `extremes`: whether maxima and minima pass.
  Candidates candidates(const Placements& now, size_t outputs, bool extremes = true) const;

 private:
  std::vector<Line> lines_;
};

// Whether a number among the arguments can be divided by: not zero, not infinite, not NaN. Of lists, all must be.
bool is_divisor(const c10::IValue& number);
// Whether an operand holds whole numbers or bools, which are not infinite.
bool is_whole(const Operand& operand);

// Whether arithmetic on maxima of these operands could wrap around: that of an empty part is the smallest whole number there is.
bool wraps_around(const Call& call, const std::vector<int>& members);

RulePtr pointwise(KeepsPartial keeps = {});

// The result of a pointwise operator on all operands: sizes broadcast, and dims lie in the operands' order.
OutputMeta pointwise_meta(const Call& call);

// The candidates of a pointwise operator over some operands of a call: `members` are indices into call.operands. Every
// member gets a placement, all other operands Replicate; `outputs` outputs follow the broadcast shape.
Candidates pointwise_candidates(const Call& call, int64_t mesh_dim, const std::vector<int>& members, size_t outputs,
                                const KeepsPartial& keeps);

}  // namespace dtensor::rules
