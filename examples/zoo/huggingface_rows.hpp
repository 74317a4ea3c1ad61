// Which tensor of Hugging Face's models is which of the zoo's, and in what way it differs.
#pragma once

#include "huggingface_config.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace zoo {

enum class How {
  same,
  transposed,   // [in, out] there
  rotary,       // rows of a head: first halves of pairs, then second halves; pairs are neighbours in ours
  kv_rotary,    // the same, for the heads of keys
  three_in_one  // query, key and value, one behind the other in ours
};

// `#` stands for the number of a layer.
struct Row {
  std::string ours, theirs;
  How how = How::same;
};

// All of a model: a row for each tensor of each layer.
std::vector<Row> rows_of(const Counts& counts);

// The parts of three_in_one, in the order in which ours has them; and the name of one, which stands where a row of theirs has '@'.
inline const std::vector<std::string> kThree{"query", "key", "value"};
std::string name_of_part(const Row& row, const std::string& part);

// Throws dtensor::Error unless a tensor of these sizes can be converted. Theirs is the first of three where ours is three in one.
void check_sizes(const std::string& name, const std::vector<int64_t>& sizes, How how, const Counts& counts, bool is_ours);

// The name that a checkpoint has: GPT-2's on the hub lack the "transformer." that transformers saves. `has`: whether there is such a name.
template <class Has>
std::string known_name(const Has& has, const std::string& name) {
  const std::string prefix = "transformer.";
  return !has(name) && name.starts_with(prefix) && has(name.substr(prefix.size())) ? name.substr(prefix.size()) : name;
}

}  // namespace zoo
