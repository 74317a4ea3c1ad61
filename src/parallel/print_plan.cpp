// Prints the layouts of a module's parameters as a table. It is compiled because the headers of torch::nn would more than double the
// compile time of <dtensor/dtensor.hpp>.
#include <dtensor/parallel/plans.hpp>

#include "src/parallel/tensors_of.hpp"

#include <dtensor/tensor/tensor.hpp>

#include <fmt/ranges.h>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <iostream>
#include <set>

namespace dtensor {

namespace {

std::string readable(int64_t bytes) {
  constexpr double kKiB = 1024;
  const auto b = static_cast<double>(bytes);
  if (b < kKiB) return fmt::format("{} B", bytes);
  if (b < kKiB * kKiB) return fmt::format("{:.1f} KiB", b / kKiB);
  return b < kKiB * kKiB * kKiB ? fmt::format("{:.1f} MiB", b / kKiB / kKiB) : fmt::format("{:.2f} GiB", b / kKiB / kKiB / kKiB);
}

bool is_cut_by(PlacementsRef placements) {
  return std::ranges::any_of(placements, [](const Placement& p) { return p.cuts(); });
}

}  // namespace

std::string describe_plan(const torch::nn::Module& module) {
  std::vector<std::array<std::string, 5>> rows{{"name", "tensor", "placements", "this rank", "whole"}};
  int64_t here = 0, everywhere = 0;
  bool is_cut = false, on_ranks = false;
  std::set<const c10::TensorImpl*> seen;  // a tied one counts once
  for (const auto& [name, tensor] : detail::tensors_of(module)) {
    if (!tensor.defined()) continue;
    const auto whole = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    const bool distributed = is_dtensor(tensor), again = !seen.insert(tensor.unsafeGetTensorImpl()).second;
    const auto own =
        distributed ? c10::multiply_integers(DTensor(tensor).layout().local_sizes()) * static_cast<int64_t>(tensor.element_size()) : whole;
    rows.push_back({name, fmt::format("{}[{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", ")),
                    again ? "(tied)" : distributed ? str(DTensor(tensor).placements()) : "plain", again ? "" : readable(own),
                    again ? "" : readable(whole)});
    is_cut |= distributed && is_cut_by(DTensor(tensor).placements());
    on_ranks |= distributed && DTensor(tensor).mesh().size() > 1;
    here += again ? 0 : own;
    everywhere += again ? 0 : whole;
  }
  rows.push_back({"total", "", "", readable(here), readable(everywhere)});
  std::array<size_t, 5> widths{};
  for (const auto& row : rows) {
    for (auto&& [width, cell] : ranges::views::zip(widths, row)) width = std::max(width, cell.size());
  }
  std::string text;
  for (const auto& row : rows) {
    text += fmt::format("{:<{}}  {:<{}}  {:<{}}  {:>{}}  {:>{}}\n", row[0], widths[0], row[1], widths[1], row[2], widths[2], row[3],
                        widths[3], row[4], widths[4]);
  }
  return is_cut || !on_ranks ? text : text + "nothing is cut: every rank has the whole module\n";
}

void print_plan(const torch::nn::Module& module, std::ostream& out) { out << describe_plan(module) << std::flush; }
void print_plan(const torch::nn::Module& module) { print_plan(module, std::cout); }

}  // namespace dtensor
