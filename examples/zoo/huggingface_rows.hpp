// Which tensor of Hugging Face's models is which of the zoo's, and in what way it differs.
#pragma once

#include "huggingface_config.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace zoo {

enum class How {
  same,
  transposed,    // [in, out] there
  rotary,        // rows of a head: first halves of pairs, then second halves; pairs are neighbours in ours
  kv_rotary,     // the same, for the heads of keys
  head_rotary,   // the same, for one head
  three_in_one,  // query, key and value, one behind the other in ours
  stacked,       // a tensor of each expert, one above the other in ours
  gates,
  ups  // of the experts of one tensor [experts, 2 hidden, dim], the first halves of the rows, and the second
};

// `#` stands for the number of a layer, and `@` for that of an expert or for a name of three.
struct Row {
  std::string ours, theirs;
  How how = How::same;
  bool is_only_read = false;  // another form of what is written as a row before it says
};

// All of a model: a row for each tensor of each layer.
std::vector<Row> rows_of(const Counts& counts);

// How many of their tensors are one of ours, and the names of these, in our order.
int64_t parts_of(const Row& row, const Counts& counts);
std::string name_of_part(const Row& row, int64_t part);

// Throws dtensor::Error unless a tensor of these sizes can be converted. Theirs is the first part.
void check_sizes(const std::string& name, const std::vector<int64_t>& sizes, How how, const Counts& counts, bool is_ours);

// The name that a checkpoint has: GPT-2's on the hub lack the "transformer." that transformers saves. `has`: whether there is such a name.
template <class Has>
std::string known_name(const Has& has, const std::string& name) {
  const std::string prefix = "transformer.";
  return !has(name) && name.starts_with(prefix) && has(name.substr(prefix.size())) ? name.substr(prefix.size()) : name;
}

}  // namespace zoo
