// Sample arguments of operators, written as text.
//
//   self=[6,4] index=[3]<6 dim=1        a value per argument, by its name in the schema; the others have their defaults
//   *=[5,3]                             every tensor that is not named
//
// A tensor is its sizes and marks: none - random numbers of the sample's dtype; f - floating whatever that dtype is; + - positive;
// u - in (0, 1); i - whole numbers; j - of 32 bits; q - counts: whole numbers from 0, in the sample's dtype; y - bytes; h, w, g - half,
// bfloat16, float; n - with infinities and NaN; e - with infinities; <n - indices below n; ^n - offsets of n elements; /n - lengths that
// add up to n; <nr - lengths up to n, falling; p - a permutation of indices; v - pivots; ? - truth values; c - complex; d - positive
// definite matrices; l - lower triangular; m - what max pooling of windows of 2 finds; s - sorted along the last dim; o - ones. In memory:
// t - the last two dims lie transposed; k - dim 1 lies innermost; x - dim 0 is expanded.
// "-" is no tensor. Lists of tensors stand in braces: {[5,3];[4]}.
#pragma once

#include "tools/opcheck/operators.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace dtensor::opcheck {

using Stack = std::vector<c10::IValue>;

struct Sample {
  std::string text;
  at::ScalarType dtype = at::kDouble;
  Stack arguments;   // plain tensors
  Stack results;     // what one device returns for them, and
  Stack after;       // how the arguments are then
  std::vector<at::Tensor> undetermined;        // where results hold what memory held before: true. Undefined: nowhere
  std::vector<at::Tensor> undetermined_after;  // the same of the arguments
  bool by_chance = false;  // empty or length-one tensors, or equal results: placements may agree by chance
};

struct Attempt {
  std::function<bool(const std::string&)> begin;  // asked before libtorch's own operator is tried on a text. False: it crashes there
  std::function<void(const std::string&)> leave_out;  // told of a sample to which that operator has more than one answer, and why
};

// Every sample of `dtype` that the operator takes on one device.
std::vector<Sample> samples_of(const Operator& op, at::ScalarType dtype, const Attempt& attempt = {});
// `count` samples that are made from others: operands that broadcast, short lengths, infinities and NaN, memory orders, dtypes.
std::vector<Sample> widened_samples(const Operator& op, const std::vector<std::string>& texts, size_t count, const Attempt& attempt);
// The same arguments with other values.
std::optional<Sample> drawn_again(const Operator& op, const Sample& sample);

// The texts for an operator (samples_table.cpp); empty when it has none of its own.
std::vector<std::string> texts_of(const std::string& base);
const char* common_samples();  // the table
const char* rare_samples();    // more of its lines
// Texts that are tried on operators without.
std::vector<std::string> general_texts();

// Texts made from texts, a list for each class, in an order drawn for the operator (widen.cpp).
std::vector<std::vector<std::string>> widened(const c10::FunctionSchema& schema, const std::vector<std::string>& texts);

// What memory holds of a tensor: of an expanded dim one slice.
at::Tensor stored(const at::Tensor& tensor);

// Fills memory that is allocated with a byte, as long as it lives: what depends on that byte was read before it was written.
struct FilledMemory {
  explicit FilledMemory(int byte);
  ~FilledMemory();
};

// A copy whose tensors share no memory with the original's, and lie in the same order.
Stack deep_copy(const Stack& values);

// The tensors among some values, lists flattened; undefined ones included where `undefined`.
std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values, bool undefined = false);

// Whether what an operator writes had another size before.
bool resized(const c10::FunctionSchema& schema, const Stack& now, const Stack& before);

}  // namespace dtensor::opcheck
