// A picture of a run's curves.
#pragma once

#include "../loss_plot.hpp"

#include <dtensor/rl/metrics.hpp>

// The number `name` of each step as a curve; steps that lack it leave gaps.
inline std::vector<double> curve_of(const std::vector<dtensor::rl::Metrics>& steps, const std::string& name) {
  std::vector<double> values;
  for (const auto& step : steps)
    values.push_back(step.contains(name) ? step.at(name).get<double>() : std::numeric_limits<double>::quiet_NaN());
  return values;
}

inline std::string metric_panel(plot::Panel panel, const std::vector<double>& values, const std::string& title) {
  panel.y0 = std::numeric_limits<double>::infinity(), panel.y1 = -panel.y0;
  for (const double value : values) {
    if (std::isfinite(value)) panel.y0 = std::min(panel.y0, value), panel.y1 = std::max(panel.y1, value);
  }
  if (!std::isfinite(panel.y0)) panel.y0 = 0, panel.y1 = 1;
  const double margin = 0.05 * (panel.y1 - panel.y0) + 1e-6;
  panel.y0 -= margin, panel.y1 += margin;
  const auto label = [](double value) { return fmt::format("{:.4g}", value); };
  return plot::axes(panel, plot::ticks(panel.y0, panel.y1, 4), label, title) + plot::polyline(panel, values, plot::stroke(0, false));
}

// Writes reward, share of right answers, entropy, divergence, gradient norm and length, one below the other. Throws std::runtime_error when
// the file cannot be written.
inline void write_metrics_plot(const std::string& path, const std::vector<dtensor::rl::Metrics>& steps) {
  const std::vector<std::pair<const char*, const char*>> shown{
      {"critic/score/mean", "reward"},      {"reward/right", "share of right answers"},
      {"actor/entropy", "entropy (nats)"},  {"actor/ppo_kl", "divergence of an update"},
      {"actor/grad_norm", "gradient norm"}, {"response_length/mean", "tokens of an answer"}};
  plot::Panel panel{80, 40, 850, 150, 0, static_cast<double>(std::max<size_t>(steps.size(), 2) - 1), 0, 1};
  std::string body;
  for (const auto& [name, title] : shown) {
    body += metric_panel(panel, curve_of(steps, name), title);
    panel.top += 220;
  }
  plot::write(path, panel.top, body);
}
