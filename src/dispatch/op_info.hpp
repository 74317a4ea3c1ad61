// What the schema of an operator says, worked out once per operator.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

namespace dtensor::dispatch {

struct OpInfo {
  std::string name;                 // "aten::add.Tensor"
  const c10::FunctionSchema* schema = nullptr;
  const rules::Rule* rule = nullptr;
  std::vector<int> written;         // arguments that the operator writes (in place, out=)
  std::vector<int> returns_argument; // per return: the argument it is (in place, out=), or -1
  bool makes_results = false;       // no result is an argument, though arguments may be written too (running statistics)
  bool in_place = false;            // writes its first argument and is not an out= form
  bool changes_metadata = false;    // resize_, set_, ...: would part layout and local tensor
  c10::optional<c10::OperatorHandle> becomes;  // of squeeze_, t_, ...: the view that the tensor becomes
  bool is_view = false;             // returns an alias of an argument
  bool has_tensor_argument = false; // false: a factory
  std::optional<c10::OperatorHandle> functional = {};  // of an out= form: what returns the result instead
  bool has_tensor_list = false;     // among arguments or results
  bool returns_tensors_only = true; // nothing but tensors and lists of them
  mutable std::atomic<bool> decided = false;  // some call has been decided on by `rule`, and is remembered
};

// Whether the operator writes the argument without reading its values.
inline bool is_overwritten(const OpInfo& info, int argument) { return argument == 0 && info.schema->name() == "aten::copy_"; }

const OpInfo& info_of(const c10::OperatorHandle& op);

// Whether a call of the operator has been decided on, so that its rule can no longer change.
bool is_decided(const c10::OperatorHandle& op);

// Takes notice of a rule that was registered late.
void find_rule_again(const c10::OperatorHandle& op);

}  // namespace dtensor::dispatch
