// The rule of operators whose output elements depend on the operands' elements at the same (broadcast) position.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <vector>

namespace dtensor::rules {

// Which reductions may stay pending through an operator:
//   data movement    all of them
//   sums, averages   through operators that add them up, or scale them by factors that cannot be infinite. (A summand may be zero, or have
//                    another sign than the sum; infinity times it would be NaN.)
//   extremes         through increasing operators of that operand alone that give a number for an infinity. (A rank without elements holds
//                    one.)
// The average and the extremes of equal values v are v.
inline const std::vector<ReduceOp> kAnyPartial{ReduceOp::sum, ReduceOp::avg, ReduceOp::product,
                                               ReduceOp::min, ReduceOp::max, ReduceOp::norm2};
inline const std::vector<ReduceOp> kSums{ReduceOp::sum, ReduceOp::avg};
inline const std::vector<ReduceOp> kExtremes{ReduceOp::max, ReduceOp::min};
inline const std::vector<ReduceOp> kOfEqualValues{ReduceOp::avg, ReduceOp::max, ReduceOp::min};

// The Partial operands on which an operator may run. The operands of one list of `together` are Partial(op) with op in `ops`, all others
// are replicated, and the outputs are Partial(op) too. `flips`: the operator makes a minimum of a maximum, and the reverse.
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

  // The combinations of both.
  friend KeepsPartial operator|(KeepsPartial a, const KeepsPartial& b) {
    a.lines_.insert(a.lines_.end(), b.lines_.begin(), b.lines_.end());
    return a;
  }

  // The combinations for operands with placements `now` on one mesh dimension: those of a line in which some operand is Partial.
  // `extremes`: whether maxima and minima pass.
  Candidates candidates(const Placements& now, size_t outputs, bool extremes = true) const;

 private:
  std::vector<Line> lines_;
};

// Whether a number among the arguments can be divided by: not zero, not infinite, not NaN. Of lists, all must be.
bool is_divisor(const c10::IValue& number);
// Whether an operand holds whole numbers or bools, which are not infinite.
bool is_whole(const Operand& operand);

// Whether arithmetic on maxima of these operands could wrap around: an empty local tensor has the smallest integer as its maximum.
bool wraps_around(const Call& call, const std::vector<int>& members);

RulePtr pointwise(KeepsPartial keeps = {});

// The metadata of the result of a pointwise operator on all operands: sizes broadcast, and memory order is that of the operands.
OutputMeta pointwise_meta(const Call& call);

// The candidates of a pointwise operator over some operands of a call: `members` are indices into call.operands. Every
// member gets a placement, all other operands Replicate; `outputs` outputs follow the broadcast shape.
Candidates pointwise_candidates(const Call& call, int64_t mesh_dim, const std::vector<int>& members, size_t outputs,
                                const KeepsPartial& keeps);

}  // namespace dtensor::rules
