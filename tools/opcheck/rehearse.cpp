#include "tools/opcheck/rehearse.hpp"

#include "src/dispatch/decide.hpp"
#include "tools/opcheck/text.hpp"

#include <dtensor/dtensor.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <regex>
#include <set>

namespace dtensor::opcheck {

namespace {

// "self=[6,4] index=[5]<6" with 6 as 1: "self=[1,4] index=[5]<1". Lengths that belong together stay equal.
std::string with_length(const std::string& text, const std::string& length, const std::string& instead) {
  return std::regex_replace(text, std::regex("(^|[^0-9.])" + length + "(?![0-9.])"), "$01" + instead);
}

// The text with each length in turn as `instead`.
std::set<std::string> with_lengths(const Operator& op, const std::string& text, const std::string& instead) {
  static const std::set<std::string> no_others{"native_channel_shuffle", "unfold_backward"};  // which divide by it, on one device too
  static const std::regex number("[0-9.]+");
  std::set<std::string> all;
  if (no_others.count(op.base)) return all;
  for (auto it = std::sregex_iterator(text.begin(), text.end(), number); it != std::sregex_iterator(); ++it) {
    const auto length = it->str();
    if (length.find('.') == std::string::npos && std::stoll(length) > 1) all.insert(with_length(text, length, instead));
  }
  return all;
}

// The arguments of a text, whether or not the operator takes them; none where it does not fit the schema.
std::optional<Stack> arguments_of(const Operator& op, const std::string& text, at::ScalarType dtype) {
  try {
    return arguments_from(op.schema(), text, dtype);
  } catch (const Misfit&) {
  } catch (const std::exception&) {  // there is no index below 0
  }
  return {};
}

bool has_integers(const rules::Call& call) {
  return std::ranges::any_of(call.operands,
                     [](const auto& operand) { return at::isIntegralType(operand.layout->dtype(), /*includeBool=*/false); });
}

// libtorch takes a composite apart before dispatch sees it.
bool is_dispatched(const Operator& op) {
  return (!op.composite || op.has_rule()) && !is_out_form(op.schema()) && !is_of_libtorch_itself(op);
}

}  // namespace

Rehearsals rehearse_all(const std::vector<Operator>& operators, const std::function<void(const std::string&)>& tell) {
  World world(comm::make_fake_transport(0, 1));
  World::Use use(world);
  const auto mesh = init_device_mesh(at::kCPU, {1});
  Rehearsals found;
  const auto rehearse = [&](const Operator& op, const std::string& text, bool only_integers) {
    for (const auto dtype : {at::kDouble, at::kLong}) {
      const auto arguments = arguments_of(op, text, dtype);
      if (!arguments) continue;
      const rules::Call call(op.schema(), *arguments, mesh);
      if (call.operands.empty() || (only_integers && !has_integers(call))) continue;
      tell(fmt::format("{} {} ({})", op.name, text, c10::toString(dtype)));
      try {
        dispatch::rehearse(op.handle, call) ? ++found.taken : ++found.not_tried;
      } catch (const Error&) {
        ++found.refused;
      }
    }
  };
  for (const auto& op : operators) {
    if (!is_dispatched(op)) continue;
    const auto before = found.taken + found.refused;
    const auto own = texts_of(op.base);
    for (const auto& text : own.empty() ? general_texts() : own) {
      rehearse(op, text, false);
      if (own.empty()) continue;
      for (const auto& short_one : with_lengths(op, text, "1")) rehearse(op, short_one, false);
      for (const auto& empty : with_lengths(op, text, "0")) rehearse(op, empty, true);  // there is no first position
    }
    found.operators += found.taken + found.refused > before;
  }
  return found;
}

}  // namespace dtensor::opcheck
