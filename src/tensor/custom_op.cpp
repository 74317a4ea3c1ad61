// register_rule: sharding rules for operators of users.
#include <dtensor/tensor/custom_op.hpp>

#include "src/dispatch/op_info.hpp"

#include <dtensor/base/error.hpp>

#include <sstream>
#include <string>

namespace dtensor {

namespace {

std::string text_of(const c10::FunctionSchema& schema) {
  std::ostringstream text;
  text << schema;
  return text.str();
}

// Those called `name`, with its overload or with any.
std::vector<c10::OperatorHandle> operators(const std::string& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  const auto add = [&](const c10::OperatorName& exact) {
    if (const auto op = dispatcher.findSchema(exact)) found.push_back(*op);
  };
  if (const auto dot = name.find('.'); dot != std::string::npos) {
    add({name.substr(0, dot), name.substr(dot + 1)});
    return found;
  }
  for (const auto& candidate : dispatcher.getAllOpNames()) {
    if (candidate.name == name) add(candidate);
  }
  return found;
}

std::vector<c10::OperatorHandle> known_operators(const std::string& name) {
  auto found = operators(name);
  require(!found.empty(), "register_rule",
          "there is no operator {}; hint: define it with TORCH_LIBRARY first, and name it as there, \"namespace::name\" or "
          "\"namespace::name.overload\"", name);
  return found;
}

}  // namespace

void register_rule(std::string_view name, rules::RulePtr rule, std::string_view why) {
  const std::string op(name);
  require(rule != nullptr, "register_rule", "{}: the rule is null", op);
  const auto found = known_operators(op);
  for (const auto& handle : found) {
    const auto fault = rule->misfit(handle.schema());
    require(fault.empty(), "register_rule", "{} cannot have this rule: {}; the schema is {}", op, fault, text_of(handle.schema()));
    require(!handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd), "register_rule",
            "{} is made of other operators, and taken apart before a rule is asked; the schema is {}; hint: register rules for those, or "
            "define it with a kernel for a device (library.impl)",
            op, text_of(handle.schema()));
    require(!dispatch::is_decided(handle), "register_rule",
            "{} has been called on distributed tensors already, and how is remembered; the schema is {}; hint: register rules first",
            op, text_of(handle.schema()));
  }
  rules::Register(op, std::move(rule), why);
  for (const auto& handle : found) dispatch::find_rule_again(handle);
}

void register_rule(std::string_view name, std::string_view notation, rules::Options options) {
  const std::string op(name);
  const auto found = known_operators(op);
  rules::RulePtr rule;
  try {
    rule = rules::einsum(notation, std::move(options));
  } catch (const Error& error) {
    fail("register_rule", "{} cannot have this rule: {}; the schema is {}", op, error.what_without_backtrace(),
         text_of(found.front().schema()));
  }
  register_rule(name, std::move(rule), notation);
}

}  // namespace dtensor
