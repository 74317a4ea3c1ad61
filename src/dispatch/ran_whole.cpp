#include "src/dispatch/ran_whole.hpp"

#include "src/base/fast_thread_local.hpp"
#include "src/mesh/world_state.hpp"

#include <dtensor/base/say.hpp>
#include <dtensor/dispatch/replication_debug.hpp>
#include <dtensor/mesh/world.hpp>

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

namespace dtensor {

namespace {

DTENSOR_FAST_THREAD_LOCAL ReplicationDebugMode* counting = nullptr;

bool warns_by_default() {
  const char* value = std::getenv("DTENSOR_WARN_REPLICATED");
  return !value || std::string_view(value) != "0";
}
std::atomic<bool> warns = warns_by_default();

struct Told {
  std::mutex mutex;
  std::set<std::string> calls;
};
Told& told() {
  static Told all;
  return all;
}

}  // namespace

ReplicationDebugMode::ReplicationDebugMode() : outer_(counting) { counting = this; }
ReplicationDebugMode::~ReplicationDebugMode() { counting = outer_; }

int64_t ReplicationDebugMode::count() const {
  int64_t sum = 0;
  for (const auto& [line, totals] : lines_) sum += totals.count;
  return sum;
}

int64_t ReplicationDebugMode::bytes() const {
  int64_t sum = 0;
  for (const auto& [line, totals] : lines_) sum += totals.bytes;
  return sum;
}

void ReplicationDebugMode::add(const std::string& op, const std::string& operands, int64_t bytes) {
  auto& totals = lines_[{op, operands}];
  ++totals.count;
  totals.bytes += bytes;
}

std::string ReplicationDebugMode::str() const {
  std::vector<std::pair<Line, Totals>> sorted(lines_.begin(), lines_.end());
  std::ranges::stable_sort(sorted, [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  auto text = fmt::format("{:>8} {:>14}  {}\n", "count", "bytes", "ran whole on every rank");
  for (const auto& [line, totals] : sorted)
    text += fmt::format("{:>8} {:>14}  {}({})\n", totals.count, totals.bytes, line.op, line.operands);
  return text + fmt::format("{:>8} {:>14}  total\n", count(), bytes());
}

void set_replication_warnings(bool on) {
  std::lock_guard<std::mutex> lock(told().mutex);
  told().calls.clear();
  warns = on;
}
bool replication_warnings() { return warns; }

namespace dispatch {

namespace {

// Whether a mesh dimension cuts an operand, and no operand and no result of the call itself.
bool runs_whole(const rules::Call& call, const rules::Resolution& resolution, int64_t m) {
  const auto whole = [m](const LayoutPtr& layout) { return layout->placements()[m].is_replicate(); };
  const auto was_cut = [m](const rules::Operand& operand) { return operand.placements()[m].is_shard(); };
  return call.mesh.size(m) > 1 && std::ranges::any_of(call.operands, was_cut) &&
         std::ranges::all_of(resolution.in, whole) &&
         std::ranges::all_of(resolution.out, [m](const Placements& out) { return out[m].is_replicate(); });
}

int64_t bytes_of(const Layout& layout) {
  return c10::multiply_integers(layout.sizes()) * static_cast<int64_t>(c10::elementSize(layout.dtype()));
}

void warn_of(const OpInfo& info, const RanWhole& call, const DeviceMesh& mesh) {
  call.told = true;
  constexpr int64_t kWorthIt = 64 << 10;
  constexpr size_t kMost = 8;
  const auto* world = dtensor::detail::existing_world();
  if (call.bytes < kWorthIt || !warns || !info.rule || info.schema->name() == "aten::copy_") return;
  if (!world || world->rank() != mesh.ranks()[0]) return;
  std::lock_guard<std::mutex> lock(told().mutex);
  if (told().calls.size() >= kMost || !told().calls.insert(info.name + call.operands).second) return;
  dtensor::detail::say(
      "dtensor: {}({}) runs whole on every rank and gathers {} bytes for it (said once, of {} such calls at most); hint: "
      "dt::ReplicationDebugMode lists them all, dt::explain tells why, dt::redistribute lays out the operand that is whole; "
      "DTENSOR_WARN_REPLICATED=0 silences this\n",
      info.name, call.operands, call.bytes, kMost);
}

}  // namespace

std::shared_ptr<const RanWhole> find_ran_whole(const OpInfo& info, const rules::Call& call, const rules::Resolution& resolution) {
  if (info.name == "aten::_local_scalar_dense") return nullptr;
  auto found = std::make_shared<RanWhole>();
  for (int64_t m = 0; m < call.mesh.ndim(); ++m) {
    if (!runs_whole(call, resolution, m)) continue;
    for (const auto& operand : call.operands) {
      if (operand.placements()[m].is_shard()) found->bytes += bytes_of(*operand.layout);
    }
  }
  if (found->bytes == 0) return nullptr;
  for (const auto& operand : call.operands) found->operands += (found->operands.empty() ? "" : ", ") + operand.layout->str();
  return found;
}

void note_ran_whole(const Decision& decision) {
  const auto& call = *decision.ran_whole;
  if (counting) return counting->add(decision.info->name, call.operands, call.bytes);
  if (!call.told) warn_of(*decision.info, call, decision.mesh);
}

}  // namespace dispatch

}  // namespace dtensor
