#include "src/checkpoint/optimizer_names.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <set>

namespace dtensor::checkpoints {

namespace {

using Options = std::set<std::string>;

// By optimizer: the names of the options of its groups, from "optimizer.groups.0.lr".
std::map<std::string, Options> options_in(const std::map<std::string, Value>& values) {
  constexpr std::string_view kGroups = ".groups.";
  std::map<std::string, Options> all;
  for (const auto& [name, value] : values) {
    const auto at = name.find(kGroups);
    if (at == std::string::npos) continue;
    const auto digits = at + kGroups.size(), end = name.find_first_not_of("0123456789", digits);
    if (end != std::string::npos && end > digits && name[end] == '.') all[name.substr(0, at)].insert(name.substr(end + 1));
  }
  return all;
}

// Of libtorch, by an option that no other has.
std::string kind_of(const Options& options) {
  const std::pair<const char*, const char*> kinds[] = {{"amsgrad", "Adam or AdamW"},
                                                       {"nesterov", "SGD"},
                                                       {"centered", "RMSprop"},
                                                       {"initial_accumulator_value", "Adagrad"},
                                                       {"history_size", "LBFGS"}};
  for (const auto& [option, name] : kinds) {
    if (options.contains(option)) return fmt::format("{} of libtorch", name);
  }
  return fmt::format("an optimizer with the options {}", fmt::join(options, ", "));
}

}  // namespace

std::string state_prefix(const std::string& optimizer, const TensorNames& names, const at::Tensor& parameter, size_t group,
                         size_t position) {
  const auto found = names.find(parameter.unsafeGetTensorImpl());
  return fmt::format("{}.state.{}.", optimizer, found == names.end() ? fmt::format("#{}.{}", group, position) : found->second);
}

std::map<std::string, std::string> other_optimizers(const std::map<std::string, Value>& wanted, const std::map<std::string, Value>& saved) {
  std::map<std::string, std::string> others;
  const auto before = options_in(saved);
  for (const auto& [name, options] : options_in(wanted)) {
    const auto found = before.find(name);
    if (found == before.end() || found->second == options) continue;
    others[name] = fmt::format(
        "'{}' was saved from {}, and is {}; hint: resume with the optimizer that was saved, or leave its state out by .without", name,
        kind_of(found->second), kind_of(options));
  }
  return others;
}

}  // namespace dtensor::checkpoints
