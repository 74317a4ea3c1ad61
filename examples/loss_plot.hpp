// Loss curves of several runs: how far they are from one device's, and a picture of them (SVG).
#pragma once

#include <dtensor/base/xml.hpp>

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

struct Curve {
  std::string name;
  std::vector<double> loss;              // one per step
  std::vector<at::Tensor> initial = {};    // parameters before the first, whole; when they are to be compared
  std::vector<at::Tensor> gradients = {};  // of the first step, whole; the same
};

// The largest |a - b| / |b| over the steps, b being the reference; infinite when a loss is not finite or the lengths
// differ.
inline double relative_difference(const Curve& a, const Curve& b) {
  if (a.loss.size() != b.loss.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (size_t i = 0; i < a.loss.size(); ++i) {
    const double d = std::abs(a.loss[i] - b.loss[i]) / std::abs(b.loss[i]);
    if (!std::isfinite(d)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, d);
  }
  return largest;
}

namespace plot {

// A rectangle of the picture and the data range that it shows.
struct Panel {
  double left, top, width, height;
  double x0, x1, y0, y1;
  double x(double value) const { return left + width * (value - x0) / (x1 - x0); }
  double y(double value) const { return top + height * (1 - (value - y0) / (y1 - y0)); }
};

// About `count` round numbers (1, 2 or 5 times a power of ten apart) between `from` and `to`.
inline std::vector<double> ticks(double from, double to, int count) {
  const double rough = (to - from) / count, power = std::pow(10, std::floor(std::log10(rough)));
  const double step = power * (rough > 5 * power ? 10 : rough > 2 * power ? 5 : rough > power ? 2 : 1);
  std::vector<double> values;
  for (double i = std::ceil(from / step); i * step <= to + step * 1e-9; ++i) values.push_back(i * step);
  return values;
}

inline std::string text(double x, double y, const std::string& anchor, const std::string& what, const std::string& more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n", x, y, anchor, more, dtensor::xml_escaped(what));
}

inline std::string line(double x1, double y1, double x2, double y2, const std::string& stroke) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n", x1, y1, x2, y2, stroke);
}

struct Stroke {
  std::string color, dash;
  double width;
};

// The reference is a broad pale band on which the other curves, dashed, can be seen to lie.
inline Stroke stroke(size_t index, bool reference) {
  static const char* const kColors[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};
  static const char* const kDashes[] = {"", "10 6", "3 4", "12 4 3 4", "6 3", "2 2"};
  if (reference) return {"#c9c9c9", "", 7};
  return {kColors[index % std::size(kColors)], kDashes[index % std::size(kDashes)], 1.8};
}

inline std::string attributes(const Stroke& s) {
  return fmt::format(
      "fill=\"none\" stroke-linejoin=\"round\" "
      "stroke=\"{}\" stroke-width=\"{}\" stroke-dasharray=\"{}\"",
      s.color, s.width, s.dash.empty() ? "none" : s.dash);
}

// One value per step; a value that is not finite leaves a gap.
inline std::string polyline(const Panel& panel, const std::vector<double>& values, const Stroke& s) {
  std::string path;
  bool down = false;
  for (size_t i = 0; i < values.size(); ++i) {
    const bool finite = std::isfinite(values[i]);
    if (finite) path += fmt::format("{}{:.2f} {:.2f}", down ? "L" : "M", panel.x(static_cast<double>(i)), panel.y(values[i]));
    down = finite;
  }
  return fmt::format("<path d=\"{}\" {}/>\n", path, attributes(s));
}

// Frame, grid and labels. Ticks of y are at `marks`, labelled by `label`.
template <class Label>
std::string axes(const Panel& p, const std::vector<double>& marks, Label label, const std::string& title) {
  std::string out = text(p.left, p.top - 10, "start", title, "font-weight=\"bold\"");
  for (const double value : marks) {
    out += line(p.left, p.y(value), p.left + p.width, p.y(value), "#e6e6e6");
    out += text(p.left - 8, p.y(value) + 4, "end", label(value));
  }
  for (const double value : ticks(p.x0, p.x1, 10)) {
    if (value != std::round(value)) continue;
    out += line(p.x(value), p.top + p.height, p.x(value), p.top + p.height + 5, "#444");
    out += text(p.x(value), p.top + p.height + 19, "middle", fmt::format("{:.0f}", value));
  }
  out += text(p.left + p.width, p.top + p.height + 36, "end", "step");
  out += line(p.left, p.top, p.left, p.top + p.height, "#444");
  out += line(p.left, p.top + p.height, p.left + p.width, p.top + p.height, "#444");
  return out;
}

inline std::string legend(const Panel& p, const std::vector<Curve>& curves, const Curve* reference) {
  std::string out;
  double y = p.top + 14;
  for (size_t i = 0; i < curves.size(); ++i, y += 20) {
    const double x = p.left + p.width - 190;
    out += fmt::format("<path d=\"M{} {}h36\" {}/>\n", x, y, attributes(stroke(i, &curves[i] == reference)));
    out += text(x + 46, y + 4, "start", curves[i].name);
  }
  return out;
}

inline std::string loss_panel(Panel p, const std::vector<Curve>& curves, const Curve* reference, const std::string& unit) {
  p.y0 = std::numeric_limits<double>::infinity();
  p.y1 = -p.y0;
  for (const auto& curve : curves)
    for (const double loss : curve.loss)
      if (std::isfinite(loss)) p.y0 = std::min(p.y0, loss), p.y1 = std::max(p.y1, loss);
  if (!std::isfinite(p.y0)) p.y0 = 0, p.y1 = 1;
  const double margin = 0.05 * (p.y1 - p.y0) + 1e-6;
  p.y0 -= margin, p.y1 += margin;
  auto out = axes(
      p, ticks(p.y0, p.y1, 6), [](double v) { return fmt::format("{:.4g}", v); }, "loss (" + unit + ")");
  if (reference) out += polyline(p, reference->loss, stroke(0, true));
  for (size_t i = 0; i < curves.size(); ++i)
    if (&curves[i] != reference) out += polyline(p, curves[i].loss, stroke(i, false));
  return out + legend(p, curves, reference);
}

// log10 of the largest relative difference up to each step: minus infinity while the losses are equal, and
// not finite from a loss on that is not.
inline std::vector<double> exponents(const Curve& curve, const Curve& reference) {
  std::vector<double> values;
  double largest = 0;
  for (size_t i = 0; i < std::min(curve.loss.size(), reference.loss.size()); ++i) {
    const double d = std::abs(curve.loss[i] - reference.loss[i]) / std::abs(reference.loss[i]);
    if (!(d <= largest)) largest = std::isnan(largest) ? largest : d;
    values.push_back(std::log10(largest));
  }
  return values;
}

// Equal losses are drawn at the bottom.
inline std::string difference_panel(Panel p, const std::vector<Curve>& curves, const Curve& reference) {
  p.y0 = -9, p.y1 = -4;
  for (const auto& curve : curves)
    for (const double e : exponents(curve, reference))
      if (std::isfinite(e)) p.y0 = std::min(p.y0, std::floor(e)), p.y1 = std::max(p.y1, std::ceil(e));
  p.y0 -= 0.5;
  const double apart = p.y1 - p.y0 > 8 ? 2 : 1;
  std::vector<double> marks;
  for (double e = std::ceil(p.y0); e <= p.y1; e += apart) marks.push_back(e);
  auto out = axes(
      p, marks, [](double e) { return fmt::format("1e{:.0f}", e); }, "largest relative difference to one device so far");
  for (size_t i = 0; i < curves.size(); ++i) {
    if (&curves[i] == &reference) continue;
    auto values = exponents(curves[i], reference);
    for (double& e : values) e = e < p.y0 ? p.y0 : e;
    out += polyline(p, values, stroke(i, false));
  }
  return out;
}

// A picture 960 wide. Throws std::runtime_error when the file cannot be written.
inline void write(const std::string& path, double height, const std::string& body) {
  std::ofstream out(path);
  out << fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"960\" height=\"{0}\" viewBox=\"0 0 960 {0}\" "
      "font-family=\"sans-serif\" font-size=\"13\" fill=\"#222\">\n<rect width=\"960\" height=\"{0}\" "
      "fill=\"white\"/>\n{1}</svg>\n",
      height, body);
  if (!out.flush()) throw std::runtime_error("cannot write '" + path + "'; hint: --svg needs a folder that exists");
}

}  // namespace plot

// Writes a picture of the curves, and below it, when there is a reference (one of the curves), of how far the others
// are from it. Throws std::runtime_error when the file cannot be written.
inline void write_loss_plot(const std::string& path, const std::vector<Curve>& curves, const Curve* reference,
                            const std::string& unit = "nats a byte") {
  size_t steps = 2;
  for (const auto& curve : curves) steps = std::max(steps, curve.loss.size());
  plot::Panel panel{80, 40, 850, 330, 0, static_cast<double>(steps - 1), 0, 1};
  auto body = plot::loss_panel(panel, curves, reference, unit);
  if (reference) {
    panel.top = 460, panel.height = 170;
    body += plot::difference_panel(panel, curves, *reference);
  }
  plot::write(path, panel.top + panel.height + 50, body);
}
