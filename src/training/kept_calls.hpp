// Calls of operators whose results are kept in the forward pass. When the function runs again, the kept results are returned instead of
// computed.
#pragma once

#include "src/training/random_state.hpp"

#include <ATen/core/operator_name.h>
#include <ATen/core/boxing/KernelFunction.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace c10 {
class OperatorHandle;
}

namespace dtensor::detail {

// The operators that CheckpointOptions::save names.
class KeptOperators {
 public:
  // Throws for a name that is no operator, or one of an operator that writes to its operands.
  explicit KeptOperators(const std::vector<std::string>& names);
  bool has(const c10::OperatorHandle& op) const;
  bool empty() const { return names_.empty(); }

 private:
  std::unordered_set<std::string> names_;
};

// Where a tensor that an operator saved for backward is found, when the operator is not called again.
struct SavedFrom {
  enum Kind { argument, result, neither } kind = neither;
  size_t index = 0;
};

class KeptCall {
 public:
  // After the call: its arguments, its results on the stack, and the tensors that it saved.
  KeptCall(const c10::OperatorHandle& op, const std::vector<at::Tensor>& arguments, const c10::Stack& stack,
           const std::vector<at::Tensor>& saved, const std::vector<c10::Device>& devices);

  const std::vector<SavedFrom>& saved() const { return saved_; }

  // Stands in for the call: takes its arguments off the stack and puts the kept results there. Skips the random numbers that the call drew.
  // Returns the tensors of the results. Throws when it is another operator, or when a result was written to.
  std::vector<at::Tensor> replay(const c10::OperatorHandle& op, c10::Stack* stack) const;

 private:
  struct Result {
    uint32_t version;
    bool requires_grad;
  };
  c10::OperatorName name_;
  std::vector<c10::IValue> values_;  // tensors without gradients
  std::vector<Result> results_;      // of each tensor in values_
  std::vector<SavedFrom> saved_;
  std::optional<RandomState> random_;
};

// The tensors among the last `count` values of a stack, those of lists too.
std::vector<at::Tensor> tensors_on_top(const c10::Stack& stack, size_t count);

}  // namespace dtensor::detail
