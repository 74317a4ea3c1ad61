#include "src/dispatch/op_info.hpp"

#include "src/dispatch/out_form.hpp"

#include <algorithm>
#include <mutex>
#include <ranges>
#include <unordered_map>
#include <unordered_set>

namespace dtensor::dispatch {

namespace {

const std::unordered_set<std::string> kBecomesView{
    "aten::squeeze_", "aten::unsqueeze_", "aten::t_", "aten::transpose_", "aten::swapdims_", "aten::swapaxes_",
};
// Whose out= form adds to what `out` holds, where the functional form begins with zeros.
const std::unordered_set<std::string> kAddsToOut{"aten::_compute_linear_combination"};

const std::unordered_set<std::string> kChangesMetadata{
    "aten::resize_", "aten::resize_as_", "aten::set_", "aten::as_strided_", "aten::detach_", "aten::set_data",
};

// Arguments that kernels write although the schema does not say so, in some versions.
const std::unordered_map<std::string, std::unordered_set<std::string>> kWrittenUnsaid{
    {"aten::native_batch_norm", {"running_mean", "running_var"}},
    {"aten::batch_norm_update_stats", {"running_mean", "running_var"}},
    {"aten::batch_norm_gather_stats", {"running_mean", "running_var"}},
    {"aten::batch_norm_gather_stats_with_counts", {"running_mean", "running_var"}},
    {"aten::cudnn_batch_norm", {"running_mean", "running_var"}},
    {"aten::miopen_batch_norm", {"running_mean", "running_var"}},
    {"aten::rrelu_with_noise", {"noise"}},
    {"aten::rrelu_with_noise_", {"noise"}},
};

bool is_written(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  if (argument.alias_info() && argument.alias_info()->isWrite()) return true;
  const auto unsaid = kWrittenUnsaid.find(schema.name());
  return unsaid != kWrittenUnsaid.end() && unsaid->second.count(argument.name()) && !is_out_form(schema);
}

bool is_tensor_type(const c10::TypePtr& type) {
  return type->str().find("Tensor") != std::string::npos;
}

bool is_tensor_list(const c10::TypePtr& type) {
  const auto text = type->str();
  return text.find("Tensor[]") != std::string::npos || text.find("Tensor?[]") != std::string::npos;
}

// What an argument or result may alias; of a list, what its elements may.
const std::unordered_set<c10::Symbol>& alias_sets(const c10::AliasInfo& info) {
  return info.containedTypes().empty() ? info.beforeSets() : info.containedTypes()[0].beforeSets();
}

// One name for int and SymInt, which overloads of one operator mix.
std::string type_name(const c10::Argument& argument) {
  auto name = argument.type()->str();
  for (size_t at; (at = name.find("SymInt")) != std::string::npos;) name.replace(at, 6, "int");
  return name;
}

bool same_inputs(const c10::FunctionSchema& out_form, const c10::FunctionSchema& other) {
  const auto& a = out_form.arguments();
  const auto& b = other.arguments();
  const auto inputs = std::ranges::find_if(a, [](const c10::Argument& argument) { return argument.is_out(); }) - a.begin();
  const auto same = [](const c10::Argument& x, const c10::Argument& y) {
    return x.name() == y.name() && type_name(x) == type_name(y) && !(y.alias_info() && y.alias_info()->isWrite());
  };
  return std::ranges::equal(a | std::views::take(inputs), b, same);
}

// The overload that takes what `schema`, an out= form, takes, and returns the result.
std::optional<c10::OperatorHandle> functional_of(const c10::FunctionSchema& schema) {
  static const auto by_name = [] {
    std::unordered_multimap<std::string, c10::OperatorName> names;
    for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) names.emplace(name.name, name);
    return names;
  }();
  const auto [first, last] = by_name.equal_range(schema.name());
  for (auto it = first; it != last; ++it) {
    const auto handle = c10::Dispatcher::singleton().findSchema(it->second);
    if (handle && same_inputs(schema, handle->schema())) return *handle;
  }
  return {};
}

void read_schema(OpInfo& info, const c10::FunctionSchema& schema) {
  info.schema = &schema;
  info.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto& arguments = schema.arguments();
  for (int i = 0; i < static_cast<int>(arguments.size()); ++i) {
    const auto& argument = arguments[i];
    info.has_tensor_argument |= is_tensor_type(argument.type());
    if (is_written(schema, argument)) info.written.push_back(i);
  }
  for (const auto* list : {&schema.arguments(), &schema.returns()}) {
    info.has_tensor_list |= std::any_of(list->begin(), list->end(), [](const auto& a) { return is_tensor_list(a.type()); });
  }
  for (const auto& result : schema.returns()) {
    info.returns_tensors_only &= is_tensor_type(result.type());
    int source = -1;
    if (const auto* alias = result.alias_info()) {
      for (int i = 0; i < static_cast<int>(arguments.size()) && source < 0; ++i) {
        const auto* other = arguments[i].alias_info();
        if (other && alias_sets(*other) == alias_sets(*alias)) source = i;
      }
      if (!alias->isWrite()) {
        info.is_view |= source >= 0;
        source = -1;
      }
    }
    info.returns_argument.push_back(source);
  }
  const auto& sources = info.returns_argument;
  const bool only_new = std::ranges::all_of(sources, [](int source) { return source < 0; });
  info.makes_results = only_new && (info.written.empty() || !sources.empty());
  const bool out_form = is_out_form(schema);
  info.in_place = !info.written.empty() && !out_form;
  if (out_form && !kAddsToOut.count(schema.name())) info.functional = functional_of(schema);
  info.changes_metadata = info.in_place && kChangesMetadata.count(schema.name()) > 0;
  if (kBecomesView.count(schema.name())) {
    const auto view = schema.name().substr(0, schema.name().size() - 1);
    const auto same = c10::Dispatcher::singleton().findSchema({view, schema.overload_name()});
    info.becomes = same ? *same : c10::Dispatcher::singleton().findSchemaOrThrow(view.c_str(), "int");  // transpose_ and transpose.int
  }
  info.rule = rules::find(schema);
}

struct Table {
  std::mutex mutex;
  std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>> infos;
};

Table& table() {
  static Table instance;
  return instance;
}

}  // namespace

const OpInfo& info_of(const c10::OperatorHandle& op) {
  const auto* schema = &op.schema();
  std::lock_guard<std::mutex> lock(table().mutex);
  auto& slot = table().infos[schema];
  if (!slot) {
    slot = std::make_unique<OpInfo>();
    read_schema(*slot, *schema);
  }
  return *slot;
}

bool is_decided(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> lock(table().mutex);
  const auto it = table().infos.find(&op.schema());
  return it != table().infos.end() && it->second->decided;
}

void find_rule_again(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> lock(table().mutex);
  const auto it = table().infos.find(&op.schema());
  if (it != table().infos.end()) it->second->rule = rules::find(op.schema());
}

}  // namespace dtensor::dispatch
