// The parts of a sample's text (see sample.hpp).
#pragma once

#include "tools/opcheck/sample.hpp"

#include <string>
#include <vector>

namespace dtensor::opcheck {

// What a text that does not fit a schema's types throws: the sample is for other overloads.
struct Misfit {};

// "[6,4]<5t": sizes, what the elements are, and letters.
struct TensorText {
  std::vector<int64_t> sizes;
  char kind = 0;      // '<' indices, '^' offsets, '/' lengths; 0: numbers
  int64_t bound = 0;  // of these
  std::string letters;

  bool has(char letter) const { return letters.find(letter) != std::string::npos; }
  bool is_number() const;  // drawn as any number is, in the sample's dtype
  std::string str() const;
};

TensorText read_tensor(const std::string& text);

// The tensor of a text; undefined for "-". `base`: the sample's dtype.
at::Tensor tensor_from(const std::string& text, at::ScalarType base);

// The text of an operand that has none of its own: `text`, or integers that an argument of this name may hold.
std::string with_meaning(const std::string& argument, const std::string& text);

std::vector<std::string> split(const std::string& text, char separator);
std::vector<int64_t> integers(const std::string& text);

Stack arguments_from(const c10::FunctionSchema& schema, const std::string& text, at::ScalarType base);

}  // namespace dtensor::opcheck
