// The table of sharding rules.
#include <dtensor/rules/rule.hpp>

#include <map>
#include <mutex>

namespace dtensor::rules {

namespace {

struct Table {
  std::mutex mutex;
  std::map<std::string, Entry, std::less<>> entries;
  std::vector<RulePtr> replaced;  // kept alive: decisions may still point to them
};

Table& table() {
  static Table instance;
  return instance;
}

const Entry* lookup(const std::string& name) {
  const auto it = table().entries.find(name);
  return it == table().entries.end() ? nullptr : &it->second;
}

// "ops/pointwise.cpp" -> "pointwise"
std::string stem(std::string_view file) {
  file.remove_prefix(file.find_last_of('/') + 1);
  return std::string(file.substr(0, file.find('.')));
}

// "aten::add_" -> "aten::add"; not "aten::__and__".
std::string without_underscore(const std::string& name) {
  const bool in_place = name.size() > 1 && name.back() == '_' && name[name.size() - 2] != '_';
  return in_place ? name.substr(0, name.size() - 1) : name;
}

// The caller holds the mutex.
const Entry* entry_of(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  const auto full = name + "." + schema.overload_name();
  for (const auto& candidate : {full, name, without_underscore(name) + "." + schema.overload_name(), without_underscore(name)}) {
    if (const auto* entry = lookup(candidate)) return entry;
  }
  return nullptr;
}

}  // namespace

Register::Register(std::string_view names, RulePtr rule, std::string_view why, std::source_location where) {
  std::lock_guard<std::mutex> lock(table().mutex);
  while (!names.empty()) {
    const auto end = std::min(names.find(' '), names.size());
    const std::string name(names.substr(0, end));
    if (end > 0) {
      auto& entry = table().entries[name];
      if (entry.rule) table().replaced.push_back(std::move(entry.rule));
      entry = {name, rule, std::string(why), stem(where.file_name())};
    }
    names.remove_prefix(std::min(end + 1, names.size()));
  }
}

const Entry* find_entry(const c10::FunctionSchema& schema) {
  std::lock_guard<std::mutex> lock(table().mutex);
  return entry_of(schema);
}

const Rule* find(const c10::FunctionSchema& schema) {
  const auto* entry = find_entry(schema);
  return entry ? entry->rule.get() : nullptr;
}

std::vector<Entry> all() {
  std::lock_guard<std::mutex> lock(table().mutex);
  std::vector<Entry> list;
  for (const auto& [name, entry] : table().entries) list.push_back(entry);
  return list;
}

}  // namespace dtensor::rules
