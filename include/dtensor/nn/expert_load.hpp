// How busy a model's experts are: numbers for metrics, and a picture.
#pragma once

#include <dtensor/base/xml.hpp>
#include <dtensor/nn/moe.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::nn {

struct ExpertLoad {
  std::string layer;                // its name in the model
  std::vector<int64_t> tokens;      // of the global batch, that chose each expert since update_balance, before any were dropped
  double max_over_mean = 1;         // the busiest expert's, over the mean
  int64_t dropped = 0, chosen = 0;  // choices that a capacity dropped, of so many
};

// Of each MoE that has counted tokens, in the order of the model: ask before update_balance. Every rank calls it. Communicates as counts()
// and dropped() of each layer do.
std::vector<ExpertLoad> expert_load(torch::nn::Module& module);

// A name and a number each: "experts/LAYER/max_over_mean", "experts/LAYER/dropped" (of all choices), and of the worst layer
// "experts/max_over_mean" and "experts/dropped".
std::vector<std::pair<std::string, double>> metrics_of(const std::vector<ExpertLoad>& loads);

// An SVG of layers by experts: white has no tokens, pale blue the mean, red twice the mean or more. Each box has its numbers as a title.
std::string expert_map(const std::vector<ExpertLoad>& loads);

// -- How ------------------------------------------------------------------------------------------------------------------

inline std::vector<ExpertLoad> expert_load(torch::nn::Module& module) {
  std::vector<ExpertLoad> loads;
  for (const auto& child : module.named_modules()) {
    const auto* layer = dynamic_cast<const MoEImpl*>(child.value().get());
    if (!layer) continue;
    const auto counts = layer->counts();
    const auto dropped = layer->dropped();
    const NoSpmd plain;
    const auto chosen = counts.sum().item<int64_t>();
    if (chosen == 0) continue;
    const auto mean = static_cast<double>(chosen) / static_cast<double>(counts.numel());
    loads.push_back({child.key(), expert::numbers_of(counts), static_cast<double>(counts.max().item<int64_t>()) / mean, dropped, chosen});
  }
  return loads;
}

inline std::vector<std::pair<std::string, double>> metrics_of(const std::vector<ExpertLoad>& loads) {
  std::vector<std::pair<std::string, double>> metrics;
  double most = 1, dropped = 0;
  for (const auto& load : loads) {
    const auto part = static_cast<double>(load.dropped) / static_cast<double>(std::max<int64_t>(load.chosen, 1));
    metrics.emplace_back("experts/" + load.layer + "/max_over_mean", load.max_over_mean);
    metrics.emplace_back("experts/" + load.layer + "/dropped", part);
    most = std::max(most, load.max_over_mean), dropped = std::max(dropped, part);
  }
  metrics.emplace_back("experts/max_over_mean", most);
  metrics.emplace_back("experts/dropped", dropped);
  return metrics;
}

namespace detail {

// From white over pale blue at 1 to red at 2.
inline std::string heat(double over_mean) {
  constexpr double kNone[] = {255, 255, 255}, kMean[] = {158, 202, 225}, kTwice[] = {203, 24, 29};
  const bool above = over_mean > 1;
  const auto part = std::clamp(above ? over_mean - 1 : over_mean, 0.0, 1.0);
  int rgb[3];
  for (int i = 0; i < 3; ++i) {
    const auto from = above ? kMean[i] : kNone[i], to = above ? kTwice[i] : kMean[i];
    rgb[i] = static_cast<int>(std::lround(from + part * (to - from)));
  }
  return fmt::format("#{:02x}{:02x}{:02x}", rgb[0], rgb[1], rgb[2]);
}

inline std::string svg_text(double x, double y, const char* anchor, const std::string& words) {
  return fmt::format("<text x=\"{:g}\" y=\"{:g}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, xml_escaped(words));
}

}  // namespace detail

inline std::string expert_map(const std::vector<ExpertLoad>& loads) {
  constexpr double kTop = 46, kRow = 20, kRight = 150, kWidth = 640, kTitle = 470;
  size_t experts = 1, longest = 5;
  for (const auto& load : loads) experts = std::max(experts, load.tokens.size()), longest = std::max(longest, load.layer.size());
  const double left = 16 + 7.0 * static_cast<double>(longest), box = std::clamp(kWidth / static_cast<double>(experts), 4.0, 40.0);
  const double right = left + box * static_cast<double>(experts), height = kTop + kRow * static_cast<double>(loads.size()) + 30;
  auto svg = fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:g}\" height=\"{:g}\" font-family=\"sans-serif\" "
                         "font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
                         std::max(right + kRight, kTitle), height);
  svg += detail::svg_text(8, 18, "start", "Tokens of each expert over the layer's mean: white 0, blue 1, red 2 or more");
  svg += detail::svg_text(right + 8, kTop - 8, "start", "max/mean, dropped");
  double y = kTop;
  for (const auto& load : loads) {
    svg += detail::svg_text(left - 8, y + 14, "end", load.layer);
    const auto mean = static_cast<double>(load.chosen) / static_cast<double>(load.tokens.size());
    for (size_t e = 0; e < load.tokens.size(); ++e) {
      const auto over_mean = static_cast<double>(load.tokens[e]) / mean;
      const auto about = fmt::format("{} expert {}: {} tokens, {:.2f} of the mean", load.layer, e, load.tokens[e], over_mean);
      svg += fmt::format("<rect x=\"{:g}\" y=\"{:g}\" width=\"{:g}\" height=\"{:g}\" fill=\"{}\" stroke=\"#e0e0e0\">"
                         "<title>{}</title></rect>\n",
                         left + box * static_cast<double>(e), y, box, kRow, detail::heat(over_mean), xml_escaped(about));
    }
    const auto dropped = 100.0 * static_cast<double>(load.dropped) / static_cast<double>(load.chosen);
    svg += detail::svg_text(right + 8, y + 14, "start", fmt::format("{:.2f}, {:.1f} %", load.max_over_mean, dropped));
    y += kRow;
  }
  svg += detail::svg_text(left, y + 18, "start", "expert 0");
  svg += detail::svg_text(right, y + 18, "end", fmt::format("{}", experts - 1));
  return svg + "</svg>\n";
}

}  // namespace dtensor::nn

#pragma GCC visibility pop
