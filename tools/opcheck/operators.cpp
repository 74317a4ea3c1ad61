#include "tools/opcheck/operators.hpp"

#include "src/dispatch/op_info.hpp"

#include <algorithm>
#include <set>
#include <map>

namespace dtensor::opcheck {

namespace {

bool mentions_tensor(const c10::FunctionSchema& schema) {
  const auto is_tensor = [](const c10::Argument& a) { return a.type()->str().find("Tensor") != std::string::npos; };
  return std::ranges::any_of(schema.arguments(), is_tensor) || std::ranges::any_of(schema.returns(), is_tensor);
}

std::string base_of(const std::string& name) {
  auto base = name.substr(name.find("::") + 2);
  if (base.size() > 1 && base.back() == '_' && base[base.size() - 2] != '_') base.pop_back();
  return base;
}

}  // namespace

std::vector<Operator> all_operators() {
  std::map<std::string, Operator> sorted;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle || !mentions_tensor(handle->schema())) continue;
    const auto& schema = handle->schema();
    const auto full = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
    Operator op{*handle, full, base_of(schema.name()), "", "", false};
    if (const auto* entry = rules::find_entry(schema)) op.why = entry->why, op.family = entry->family;
    op.composite = handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    sorted.emplace(full, std::move(op));
  }
  std::vector<Operator> all;
  for (auto& [name, op] : sorted) all.push_back(std::move(op));
  return all;
}

bool is_random(const Operator& op) {
  const auto& arguments = op.schema().arguments();
  return std::ranges::any_of(arguments, [](const auto& a) {
           return a.type()->str().find("Generator") != std::string::npos;
         }) ||
         op.base.find("rand") != std::string::npos || op.base.find("dropout") != std::string::npos;
}

bool is_uninitialized(const Operator& op) {
  return op.base.find("empty") != std::string::npos;
}

bool is_of_libtorch_itself(const Operator& op) {
  static const std::set<std::string> kNames{"_foobar", "_add_batch_dim", "_remove_batch_dim", "_make_dep_token"};
  return op.base.rfind("_test_", 0) == 0 || op.base.rfind("_nested_", 0) == 0 || kNames.count(op.base) > 0;
}

bool asks_exact_bits(const Operator& op) { return is_random(op) || op.base == "hash_tensor"; }

std::string functional_form(const Operator& op) {
  const auto& functional = dispatch::info_of(op.handle).functional;
  if (!functional) return {};
  const auto& schema = functional->schema();
  return schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
}

std::vector<int> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> written;
  for (int i = 0; i < static_cast<int>(schema.arguments().size()); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) written.push_back(i);
  }
  return written;
}

std::vector<int> out_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> outs;
  for (int i = 0; i < static_cast<int>(schema.arguments().size()); ++i) {
    if (schema.arguments()[i].is_out()) outs.push_back(i);
  }
  return outs;
}

}  // namespace dtensor::opcheck
