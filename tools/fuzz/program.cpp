#include "ops.hpp"

#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/grad_mode.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace dtensor::fuzz {

namespace {

const char* name(Data data) {
  switch (data) {
    case Data::whole: return "whole";
    case Data::distinct: return "distinct";
    case Data::fraction: return "fraction";
    case Data::infinite: return "infinite";
    case Data::mask: return "mask";
    case Data::index: return "index";
    case Data::cyclic: return "cyclic";
  }
  return "";
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return "f64";
    case at::kFloat: return "f32";
    case at::kLong: return "i64";
    case at::kInt: return "i32";
    case at::kBool: return "bool";
    default: return c10::toString(dtype);
  }
}

std::string print(const Leaf& leaf) {
  std::string text = fmt::format("{}({}[{}]", name(leaf.data), dtype_name(leaf.dtype), fmt::join(leaf.sizes, ", "));
  if (leaf.data == Data::index || leaf.data == Data::cyclic) text += fmt::format(", below {}", leaf.bound);
  if (leaf.data == Data::cyclic) text += fmt::format(", along {}", leaf.dim);
  if (leaf.reversed) text += ", reversed in memory";
  text += ", " + str(leaf.placements);
  return text + (leaf.requires_grad ? ", requires_grad)" : ")");
}

std::string numbers(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += fmt::format("{}v{}", text.empty() ? "" : ", ", value);
  return text;
}

std::string print(const Step& step) {
  if (step.kind == Step::Kind::leaf) return print(step.leaf);
  const bool moves = step.kind == Step::Kind::redistribute;
  auto text = fmt::format("{}({}", moves ? "redistribute" : step.op->name, numbers(step.in));
  if (moves) text += ", " + str(step.placements);
  if (!step.args.empty()) text += fmt::format("; {}", fmt::join(step.args, ", "));
  return text + ")" + (step.no_grad ? " without gradient" : "");
}

std::string print(const Seen& seen) {
  auto text = fmt::format("{}[{}]", dtype_name(seen.dtype), fmt::join(seen.sizes, ", "));
  return seen.placements.empty() ? text : text + " " + str(seen.placements);
}

}  // namespace

int Program::operators() const {
  return static_cast<int>(std::ranges::count_if(steps, [](const Step& s) { return s.kind != Step::Kind::leaf; }));
}

Seen seen(const at::Tensor& value) {
  if (!value.defined()) return {};
  Seen result{{}, value.sizes().vec(), value.strides().vec(), value.scalar_type(), value.requires_grad(), {}};
  if (is_dtensor(value)) {
    const auto placements = DTensor(value).placements();
    result.placements.assign(placements.begin(), placements.end());
  }
  c10::NoGradGuard guard;
  result.whole = full_tensor(value.detach()).clone(at::MemoryFormat::Contiguous);
  return result;
}

std::string print(const Program& program, const Outcome* outcome) {
  auto text = fmt::format("mesh {}{}{}\n", fmt::join(program.mesh, "x"), program.spmd ? ", inside Spmd" : "",
                          program.infinities ? ", infinities" : "");
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const auto& step = program.steps[i];
    text += fmt::format("  {}{}{}", numbers(step.out), step.out.empty() ? "" : " = ", print(step));
    if (outcome) {
      std::string results;
      for (const int value : step.out) {
        const auto found = outcome->values.find(value);
        if (found != outcome->values.end()) results += (results.empty() ? "" : ", ") + print(found->second);
      }
      if (step.kind != Step::Kind::leaf && !results.empty()) text += "  # " + results;
      if (outcome->refused.count(static_cast<int>(i))) text += "  # refused";
    }
    text += '\n';
  }
  for (const auto& root : program.roots) text += fmt::format("  backward from v{} with {}\n", root.value, print(root.cotangent));
  return text;
}

}  // namespace dtensor::fuzz
