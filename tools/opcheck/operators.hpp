// The operators of libtorch's registry, as opcheck sees them.
#pragma once

#include "src/dispatch/out_form.hpp"

#include <dtensor/rules/rule.hpp>

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace dtensor::opcheck {

struct Operator {
  c10::OperatorHandle handle;
  std::string name;       // "aten::add.Tensor"
  std::string base;       // "add": without namespace, overload and the underscore of the in-place form
  std::string why;        // the rule's reason; empty: no rule
  std::string family;     // the table it stands in
  bool composite = false; // libtorch decomposes it above us, into operators that are dispatched on their own

  const c10::FunctionSchema& schema() const { return handle.schema(); }
  bool has_rule() const { return !why.empty(); }
};

// All operators that take or return a tensor, by name.
std::vector<Operator> all_operators();

// Draws random numbers, or returns memory as it finds it.
bool is_random(const Operator& op);
bool is_uninitialized(const Operator& op);
bool is_of_libtorch_itself(const Operator& op);  // its tests' and its transforms', on tensors that nobody else has
bool asks_exact_bits(const Operator& op);        // whose result another rounding changes altogether

std::string functional_form(const Operator& op);  // the name of what an out= form is a form of; empty where there is none

// Arguments that the operator writes, in place or as out=.
std::vector<int> written_arguments(const c10::FunctionSchema& schema);
std::vector<int> out_arguments(const c10::FunctionSchema& schema);
using dispatch::is_out_form;

}  // namespace dtensor::opcheck
