#include "src/comm/flight/describe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace dtensor::comm::flight {

namespace {

const char* dtype_name(int8_t dtype) {
  constexpr const char* kNames[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
                                    "complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"};
  return dtype >= 0 && dtype < static_cast<int8_t>(std::size(kNames)) ? kNames[dtype] : "dtype";
}

const char* collective_name(Collective kind) {
  constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv",
                                    "barrier", "put", "get", "signal", "wait"};
  return static_cast<size_t>(kind) < std::size(kNames) ? kNames[static_cast<size_t>(kind)] : "unknown collective";
}

const char* reduce_name(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "norm2"};
  return static_cast<size_t>(op) < std::size(kNames) ? kNames[static_cast<size_t>(op)] : "?";
}

// The group's member at `position`, as a rank of the world where that is another number.
std::string member(const RingGroup* group, int position) {
  auto text = std::to_string(position);
  const bool named = group && position >= 0 && position < std::min(group->size, RingGroup::kNamed);
  if (named && group->ranks[position] != position) text += fmt::format(" (rank {})", group->ranks[position]);
  return text;
}

}  // namespace

std::string describe(const Event& call, const RingGroup* group) {
  const bool signals = call.kind == Collective::signal || call.kind == Collective::wait;
  std::string text = collective_name(call.kind);
  if (reduces(call)) text += fmt::format("({})", reduce_name(call.reduce));
  if (call.kind == Collective::broadcast) text += fmt::format("(root {})", member(group, call.root));
  if (is_message(call)) {
    const bool from = call.kind == Collective::recv || call.kind == Collective::wait;
    text += fmt::format("({} {}, {} {})", from ? "from" : "to", member(group, call.root), signals ? "pad" : "tag", call.tag);
  }
  if (is_one_sided(call)) text += fmt::format("({} {})", call.kind == Collective::put ? "to" : "from", member(group, call.root));
  text += fmt::format(" #{}", call.sequence);
  if (call.kind != Collective::barrier && !signals) text += fmt::format(" of {}[{}]", dtype_name(call.dtype), call.numel);
  const std::string_view cut = call.group, name = group ? std::string_view(group->name) : cut;
  text += fmt::format(" in group '{}'", name.starts_with(cut) ? name : cut);
  if (!call.op.empty()) text += fmt::format(" by {}", std::string_view(call.op));
  if (!call.module.empty()) text += fmt::format(" for {}", std::string_view(call.module));
  return text;
}

}  // namespace dtensor::comm::flight
