// Why an operator on distributed tensors runs as it does: what its rule offers, what each choice would cost, what is moved.
#pragma once

#include <dtensor/dispatch/placement_option.hpp>
#include <dtensor/mesh/layout.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

struct Explanation {
  using Option = PlacementOption;
  struct Move {
    std::string argument;        // its name in the schema, e.g. "mat2" or "tensors[1]"
    LayoutPtr from, to;
    MovePlan plan;
    int64_t bytes = 0;           // that this rank gives to collectives
  };

  std::string op;                // "aten::add.Tensor"
  std::string reason;            // the rule's; empty without a rule
  DeviceMesh mesh;
  std::vector<std::string> arguments = {};  // names of the operands
  std::vector<LayoutPtr> operands = {};
  std::vector<std::vector<Option>> options = {};  // per mesh dimension, in the order in which they are tried; ties go to the first
  std::vector<Move> moves = {};
  std::vector<Move> carried = {};  // what is written, gathered for the views (or the base) of it that had to be copied
  bool lowered = false;          // the local call is not just the operator on the parts
  std::vector<LayoutPtr> outputs = {};  // null: undefined; empty when only the local call tells the sizes (replicated then)
  std::string error = {};        // what the call would throw for lack of a possible choice; empty: it runs

  // A table, for people.
  std::string str() const;
};

namespace detail {
template <class T>
c10::IValue to_ivalue(const T& value) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    return static_cast<const at::Tensor&>(value);
  } else {
    return c10::IValue(value);
  }
}
}  // namespace detail

// How the operator ("aten::add.Tensor", "my::op") would run on these arguments: those of its schema, in order; missing ones at the
// end take their defaults. Tensors among them are distributed, or plain where the call itself would take them. Runs nothing and
// communicates nothing; on a mesh of the fake transport it tells of any number of ranks. Throws what the call itself would throw
// for its arguments; for an unknown operator; for one that libtorch composes of others (explain those); when no argument is
// distributed.
Explanation explain(std::string_view op, std::vector<c10::IValue> arguments);

// The same with the arguments as they are: explain("aten::mm", a, b).
template <class... Args>
Explanation explain(std::string_view op, const Args&... args) {
  return explain(op, std::vector<c10::IValue>{detail::to_ivalue(args)...});
}

}  // namespace dtensor

#pragma GCC visibility pop
