#include "src/deferred/exact.hpp"

#include <sstream>
#include <string>
#include <unordered_set>

namespace dtensor::deferred {

namespace {

std::unordered_set<std::string> names(const char* list) {
  std::istringstream text(list);
  std::unordered_set<std::string> all;
  for (std::string name; text >> name;) all.insert("aten::" + name);
  return all;
}

// By the operator's name without the underscore of the in-place form.
bool moves_bits(const std::string& name) {
  static const auto all = names(
      "empty zeros ones full empty_strided empty_like zeros_like ones_like full_like new_empty new_empty_strided new_zeros new_ones "
      "new_full copy _to_copy clone fill zero where masked_fill tril triu cat stack");
  return all.count(name) > 0;
}

// Once, if not of complex numbers.
bool rounds_once(const std::string& name) {
  static const auto all = names(
      "add sub rsub mul div neg abs sign sqrt reciprocal floor ceil round trunc clamp clamp_min clamp_max minimum maximum relu "
      "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor "
      "_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_neg _foreach_zero _foreach_copy");
  return all.count(name) > 0;
}

// a + alpha * b is rounded once by some kernels, and twice by others.
bool has_factor(const Entry& entry) {
  const auto at = entry.op->schema().argumentIndexWithName("alpha");
  return at && entry.arguments[*at].isScalar() && !entry.arguments[*at].toScalar().equal(1);
}

bool is_complex(const Entry& entry) {
  bool complex = false;
  for_each_meta(entry.arguments, [&](const at::Tensor& meta) { complex |= meta.is_complex(); });
  for (const auto& output : entry.outputs) complex |= output.is_complex();
  return complex;
}

}  // namespace

bool exact_in_shards(const Entry& entry) {
  if (!entry.op || entry.generator_at >= 0 || dispatch::info_of(*entry.op).is_view) return true;
  auto name = entry.op->schema().name();
  if (name.back() == '_') name.pop_back();
  return moves_bits(name) || (rounds_once(name) && !has_factor(entry) && !is_complex(entry));
}

}  // namespace dtensor::deferred
