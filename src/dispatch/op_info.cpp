#include "src/dispatch/op_info.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace dtensor::dispatch {

namespace {

const std::unordered_set<std::string> kChangesMetadata{
    "aten::squeeze_", "aten::unsqueeze_", "aten::t_",     "aten::transpose_", "aten::swapdims_", "aten::swapaxes_",
    "aten::resize_",  "aten::resize_as_", "aten::set_",   "aten::as_strided_", "aten::detach_",  "aten::set_data",
};

bool is_tensor_type(const c10::TypePtr& type) {
  return type->str().find("Tensor") != std::string::npos;
}

// What an argument or result may alias; of a list, what its elements may.
const std::unordered_set<c10::Symbol>& alias_sets(const c10::AliasInfo& info) {
  return info.containedTypes().empty() ? info.beforeSets() : info.containedTypes()[0].beforeSets();
}

OpInfo read_schema(const c10::FunctionSchema& schema) {
  OpInfo info;
  info.schema = &schema;
  info.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto& arguments = schema.arguments();
  for (int i = 0; i < static_cast<int>(arguments.size()); ++i) {
    const auto& argument = arguments[i];
    info.has_tensor_argument |= is_tensor_type(argument.type());
    if (argument.alias_info() && argument.alias_info()->isWrite()) info.written.push_back(i);
  }
  for (const auto& result : schema.returns()) {
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
  const bool only_new = std::all_of(sources.begin(), sources.end(), [](int source) { return source < 0; });
  info.makes_results = only_new && (info.written.empty() || !sources.empty());
  const bool out_form = !info.written.empty() && arguments[info.written[0]].is_out();
  info.in_place = !info.written.empty() && !out_form;
  info.changes_metadata = info.in_place && kChangesMetadata.count(schema.name()) > 0;
  info.rule = rules::find(schema);
  return info;
}

}  // namespace

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>> table;
  const auto* schema = &op.schema();
  std::lock_guard<std::mutex> lock(mutex);
  auto& slot = table[schema];
  if (!slot) slot = std::make_unique<OpInfo>(read_schema(*schema));
  return *slot;
}

}  // namespace dtensor::dispatch
