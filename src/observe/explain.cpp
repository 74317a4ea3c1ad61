// dt::explain: makes a decision without running it, and shows all options that were considered.
#include <dtensor/observe/explain.hpp>

#include "src/dispatch/decide.hpp"
#include "src/dispatch/execute.hpp"
#include "src/dispatch/copied_views.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <fmt/ranges.h>
#include <range/v3/view/zip.hpp>

#include <algorithm>

namespace dtensor {

namespace {

c10::OperatorHandle operator_of(const std::string& name) {
  const auto dot = name.find('.');
  const c10::OperatorName exact(name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1));
  const auto op = c10::Dispatcher::singleton().findSchema(exact);
  require(op.has_value(), "explain", "there is no operator {}; hint: the full name with overload, as in aten::add.Tensor", name);
  require(!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd), "explain",
          "libtorch composes {} of other operators, and each of them is decided on by itself; hint: explain those", name);
  return *op;
}

std::string argument_name(const c10::FunctionSchema& schema, int argument, int element) {
  const auto& name = schema.arguments()[argument].name();
  return element < 0 ? name : fmt::format("{}[{}]", name, element);
}

bool communicates(const Step& step) {
  const auto& mesh = step.before->mesh();
  return !step.from.is_replicate() &&
         std::ranges::any_of(step.mesh_dims, [&](int64_t m) { return mesh.size(m) > 1; });
}

int64_t bytes_given(const MovePlan& plan) {
  int64_t bytes = 0;
  for (const auto& step : plan.steps) {
    if (!communicates(step)) continue;
    auto part = static_cast<int64_t>(c10::elementSize(step.before->dtype()));
    for (const auto size : step.before->local_sizes()) part *= size;
    bytes += part;
  }
  return bytes;
}

Explanation::Move move_of(std::string argument, const LayoutPtr& from, const LayoutPtr& to) {
  auto plan = plan_move(from, to);
  const auto bytes = bytes_given(plan);
  return {std::move(argument), from, to, std::move(plan), bytes};
}

void add_decision(Explanation& explanation, const dispatch::Decision& decision, const c10::FunctionSchema& schema) {
  for (const auto& move : decision.moves) {
    explanation.moves.push_back(move_of(argument_name(schema, move.argument, move.element), move.from, move.to));
  }
  explanation.lowered = static_cast<bool>(decision.lowering);
  for (const auto& output : decision.outputs) explanation.outputs.push_back(output ? output->layout() : LayoutPtr());
}

// The results of an in-place operator are operands.
void add_written(Explanation& explanation, const dispatch::OpInfo& info, const rules::Call& call) {
  for (const int argument : info.returns_argument) {
    if (const auto* operand = argument < 0 ? nullptr : call.operand(argument)) explanation.outputs.push_back(operand->layout);
  }
}

// What is written through to other memories.
void add_carried(Explanation& explanation, const dispatch::OpInfo& info, const rules::Call& call) {
  for (const auto& operand : call.operands) {
    const auto& value = call.arguments[operand.argument];
    if (operand.plain || std::ranges::count(info.written, operand.argument) == 0) continue;
    const auto tensor = tensor_at(value, operand.element);
    if (!dispatch::has_copied_views(as_dtensor(tensor)->local())) continue;
    const auto whole = operand.layout->with(Placements(call.mesh.ndim(), replicate()));
    explanation.carried.push_back(move_of(argument_name(*info.schema, operand.argument, operand.element), operand.layout, whole));
  }
}

// -- The table -----------------------------------------------------------------------------------------------------------------

std::string joined(const Placements& placements) {
  std::vector<std::string> texts;
  for (const auto& placement : placements) texts.push_back(placement.str());
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::string line_of(const Explanation::Option& option, size_t width) {
  auto line = fmt::format("  {} {:<{}}", option.chosen ? '*' : ' ', joined(option.in) + " -> " + joined(option.out), width);
  if (!option.dropped.empty()) return line + "  not possible: " + option.dropped + "\n";
  line += fmt::format("  {:>10.1f} us  {:>2} moved  {:>10} elements", option.seconds * 1e6, option.moves, option.memory);
  if (option.lowering_bytes > 0) line += fmt::format("  {} bytes communicated within", option.lowering_bytes);
  return line + "\n";
}

std::string line_of(const Explanation::Move& move) {
  return fmt::format("  {} to {}: {}; {} bytes from this rank\n", move.argument, dtensor::str(move.to->placements()), move.plan.str(),
                     move.bytes);
}

std::string options_of(const Explanation& explanation, size_t mesh_dim) {
  const auto& mesh = explanation.mesh;
  auto text = fmt::format("mesh dimension {} ({} ranks): {} -> results\n", mesh.names()[mesh_dim],
                          mesh.size(static_cast<int64_t>(mesh_dim)), fmt::join(explanation.arguments, ", "));
  size_t width = 0;
  for (const auto& option : explanation.options[mesh_dim]) {
    width = std::max(width, (joined(option.in) + " -> " + joined(option.out)).size());
  }
  for (const auto& option : explanation.options[mesh_dim]) text += line_of(option, width);
  return text;
}

// Of a call that cuts what it writes first, and is then decided on anew.
Explanation explain_cut(std::string_view name, std::vector<c10::IValue> arguments, const dispatch::Move& cut,
                        const c10::FunctionSchema& schema) {
  arguments[cut.argument] = move_tensor(arguments[cut.argument].toTensor(), cut.to);
  auto explanation = explain(name, std::move(arguments));
  explanation.operands[0] = cut.from;
  explanation.moves.insert(explanation.moves.begin(), move_of(argument_name(schema, cut.argument, cut.element), cut.from, cut.to));
  return explanation;
}

}  // namespace

Explanation explain(std::string_view name, std::vector<c10::IValue> arguments) {
  const auto op = operator_of(std::string(name));
  const auto& schema = op.schema();
  try {
    schema.checkAndNormalizeInputs(arguments);
  } catch (const c10::Error& error) {
    fail(name, "{}; hint: pass the arguments of its schema, in order; those missing at the end take their defaults",
         error.what_without_backtrace());
  }
  const auto& info = dispatch::info_of(op);
  require(any_tensor(arguments, as_dtensor), info.name,
          "no argument is distributed, so there is nothing to explain; hint: make one with distribute_tensor or dt::zeros");
  const auto* entry = rules::find_entry(schema);
  Explanation explanation{.op = info.name, .reason = entry ? entry->why : "", .mesh = dispatch::common_mesh(info, arguments)};
  const rules::Call call(schema, arguments, explanation.mesh);
  for (const auto& operand : call.operands) {
    explanation.arguments.push_back(argument_name(schema, operand.argument, operand.element));
    explanation.operands.push_back(operand.layout);
  }
  try {
    const auto decision = dispatch::decide(op, info, arguments, &explanation.options);
    if (decision->cut_first && dispatch::may_cut(arguments[0].toTensor()))
      return explain_cut(name, std::move(arguments), *decision->cut_first, schema);
    add_decision(explanation, *decision, schema);
    add_written(explanation, info, call);
    add_carried(explanation, info, call);
  } catch (const Error& error) {
    if (explanation.options.empty()) throw;
    explanation.error = error.what_without_backtrace();
  }
  return explanation;
}

std::string Explanation::str() const {
  auto text = fmt::format("{} on {}\n", op, mesh.str());
  text += reason.empty() ? "no rule: replicated operands\n" : "rule: " + reason + "\n";
  for (const auto& [name, layout] : ranges::views::zip(arguments, operands)) text += fmt::format("  {} = {}\n", name, layout->str());
  for (size_t m = 0; m < options.size(); ++m) text += options_of(*this, m);
  if (!error.empty()) return text + "refused: " + error + "\n";
  text += moves.empty() ? "nothing is moved\n" : "moves\n";
  for (const auto& move : moves) text += line_of(move);
  text += carried.empty() ? "" : "what is written is carried over to views that had to be copied\n";
  for (const auto& move : carried) text += line_of(move);
  if (lowered) text += "the local call is adapted to the parts\n";
  text += outputs.empty() ? "the local call tells the results' sizes; they are replicated\n" : "results\n";
  for (const auto& output : outputs) text += fmt::format("  {}\n", output ? output->str() : "no tensor");
  return text;
}

}  // namespace dtensor
