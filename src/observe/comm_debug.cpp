#include <dtensor/observe/comm_debug.hpp>

#include <dtensor/mesh/world.hpp>

#include <fmt/format.h>

namespace dtensor {

CommDebugMode::CommDebugMode() : Observer(World::current().local<comm::Events>()) {}

void CommDebugMode::on_issue(const comm::Event& event) {
  const std::string_view op = event.op, group = event.group, module = event.module;
  if (op == comm::kCheck) return;
  for (auto* totals :
       {&lines_[{event.kind, std::string(op), std::string(group), event.implicit}], &modules_[{std::string(module), event.kind}]}) {
    ++totals->count;
    totals->bytes += event.bytes;
  }
}

int64_t CommDebugMode::count() const {
  int64_t sum = 0;
  for (const auto& [line, totals] : lines_) sum += totals.count;
  return sum;
}

int64_t CommDebugMode::count(comm::Collective kind) const {
  int64_t sum = 0;
  for (const auto& [line, totals] : lines_) sum += line.kind == kind ? totals.count : 0;
  return sum;
}

int64_t CommDebugMode::bytes() const {
  int64_t sum = 0;
  for (const auto& [line, totals] : lines_) sum += totals.bytes;
  return sum;
}

int64_t CommDebugMode::bytes(comm::Collective kind) const {
  int64_t sum = 0;
  for (const auto& [line, totals] : lines_) sum += line.kind == kind ? totals.bytes : 0;
  return sum;
}

std::string CommDebugMode::str() const {
  std::string text = fmt::format("{:<15} {:<8} {:<9} {:>8} {:>14}  {}\n", "collective", "group", "why", "count", "bytes", "operator");
  for (const auto& [line, totals] : lines_) {
    text += fmt::format("{:<15} {:<8} {:<9} {:>8} {:>14}  {}\n", comm::name(line.kind), line.group,
                        line.implicit ? "implicit" : "asked", totals.count, totals.bytes, line.op.empty() ? "-" : line.op);
  }
  return text + fmt::format("{:<15} {:<8} {:<9} {:>8} {:>14}\n", "total", "", "", count(), bytes());
}

std::string CommDebugMode::module_str() const {
  std::string text = fmt::format("{:<32} {:<15} {:>8} {:>14}\n", "module", "collective", "count", "bytes");
  for (const auto& [line, totals] : modules_) {
    const auto& [module, kind] = line;
    text += fmt::format("{:<32} {:<15} {:>8} {:>14}\n", module.empty() ? "-" : module, comm::name(kind), totals.count, totals.bytes);
  }
  return text + fmt::format("{:<32} {:<15} {:>8} {:>14}\n", "total", "", count(), bytes());
}

}  // namespace dtensor
