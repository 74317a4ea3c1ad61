// What the schema of an operator says, worked out once per operator.
#pragma once

#include <dtensor/rules/rule.hpp>

#include <ATen/core/dispatch/Dispatcher.h>

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
  bool changes_metadata = false;    // squeeze_, t_, resize_, ...: would part layout and local tensor
  bool is_view = false;             // returns an alias of an argument
  bool has_tensor_argument = false; // false: a factory
};

const OpInfo& info_of(const c10::OperatorHandle& op);

}  // namespace dtensor::dispatch
