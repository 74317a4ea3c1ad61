// Sample arguments of operators, written as text.
//
//   self=[6,4] index=[3]<6 dim=1        a value per argument, by its name in the schema; the others have their defaults
//   *=[5,3]                             every tensor that is not named
//
// A tensor is its sizes and marks: none - random numbers of the sample's dtype; f - floating whatever that dtype is; + - positive;
// u - in (0, 1); i - whole numbers; <n - indices below n; p - a permutation of indices; ? - truth values; c - complex; d - positive
// definite matrices; l - lower triangular; m - what max pooling of windows of 2 finds; s - sorted along the last dim; o - ones; t - the
// last two dims lie transposed in memory.
// "-" is no tensor. Lists of tensors stand in braces: {[5,3];[4]}.
#pragma once

#include "tools/opcheck/operators.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

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
  bool by_chance = false;  // empty or length-one tensors, or equal results: placements may agree by chance
};

// Every sample of `dtype` that the operator takes on one device.
std::vector<Sample> samples_of(const Operator& op, at::ScalarType dtype);
// The same arguments with other values.
std::optional<Sample> drawn_again(const Operator& op, const Sample& sample);

// The texts for an operator (samples_table.cpp); empty when it has none of its own.
std::vector<std::string> texts_of(const std::string& base);
// Texts that are tried on operators without.
std::vector<std::string> general_texts();

// A copy whose tensors share no memory with the original's.
Stack deep_copy(const Stack& values);

// The tensors among some values, lists flattened; undefined ones included where `undefined`.
std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values, bool undefined = false);

}  // namespace dtensor::opcheck
