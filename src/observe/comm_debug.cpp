#include <dtensor/observe/comm_debug.hpp>

#include <fmt/format.h>

namespace dtensor {

void CommDebugMode::on_issue(const comm::Record& record) {
  if (record.op == comm::kCheck) return;
  auto& totals = lines_[{record.kind, std::string(record.op), std::string(record.group), record.implicit}];
  ++totals.count;
  totals.bytes += record.bytes;
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

}  // namespace dtensor
