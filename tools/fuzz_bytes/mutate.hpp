// Changes valid inputs at random.
#pragma once

#include <random>
#include <string>
#include <vector>

namespace dtensor::fuzz_bytes {

// One of the valid inputs, with one to four changes: flipped bits, other numbers, pieces cut out, repeated or taken from another input, and
// some of the words.
std::string mutated(const std::vector<std::string>& valid, const std::vector<std::string>& words, std::mt19937_64& random);

}  // namespace dtensor::fuzz_bytes
