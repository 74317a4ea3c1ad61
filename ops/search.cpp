// Looking up values in sorted values, or in a list.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

// sorted_sequence is one row for all values, or a row per leading index of them.
Structure searchsorted(const Call& call) {
  Structure structure;
  const auto& rows = *call.operand(call.argument_index("sorted_sequence"));
  const auto* values = call.operand(call.argument_index("self"));
  auto free = values ? lettered(values->sizes()) : Dims();
  for (const auto& operand : call.operands) {
    if (values && operand.argument == values->argument) {
      structure.in.push_back(free);
      continue;
    }
    auto row = without_letters(operand.sizes());
    for (size_t d = 0; rows.ndim() > 1 && d + 1 < row.size() && d < free.size(); ++d) row[d].letter = free[d].letter;
    structure.in.push_back(std::move(row));
  }
  structure.out = {std::move(free)};
  return structure;
}

// The first tensor's elements, each by itself, against all of the others.
Structure each_against_all(const Call& call) {
  const auto& name = call.schema.arguments()[call.operands[0].argument].name();
  const bool values = name == "self" || name == "elements";
  Structure structure;
  for (const auto& operand : call.operands) structure.in.push_back(without_letters(operand.sizes()));
  if (values) structure.in[0] = lettered(call.operands[0].sizes());
  structure.out = {values ? structure.in[0] : Dims()};
  return structure;
}

const Register sorted("aten::searchsorted", family(searchsorted), "every value by itself; its row is needed whole");
const Register listed("aten::bucketize aten::isin.Tensor_Tensor aten::isin.Tensor_Scalar", family(each_against_all),
                      "every value by itself, against all that it is compared with");

}  // namespace
}  // namespace dtensor::rules
