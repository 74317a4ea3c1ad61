// Runs an out= form as its functional form, and copies the result into `out`, in the layout of `out`.
#pragma once

#include "src/dispatch/decision.hpp"

namespace dtensor::dispatch {

// Whether the operator writes its results to out= arguments.
inline bool is_out_form(const c10::FunctionSchema& schema) { return !schema.arguments().empty() && schema.arguments().back().is_out(); }

// Whether `info` is an out= form whose functional form is known.
inline bool has_functional(const OpInfo& info) { return info.functional.has_value(); }

// Replaces the arguments (stack[begin..]) by the results, which are the out= tensors. They keep their layout; like libtorch's
// kernels, throws for a result that their dtype cannot hold, and, since a layout cannot be resized, for one of another size,
// unless `out` is empty: then it becomes the result.
void run_out_form(const OpInfo& info, Stack& stack, size_t begin);

// The same of a random operator without a known functional form, which fills an `out` of the right sizes in the order of its memory.
// Returns whether the operator is one.
bool draw_out_form(const OpInfo& info, Stack& stack, size_t begin);

}  // namespace dtensor::dispatch
