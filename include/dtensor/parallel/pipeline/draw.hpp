// A schedule as a picture: SVG, and the JSON that chrome://tracing and https://ui.perfetto.dev open.
#pragma once

#include <dtensor/base/xml.hpp>
#include <dtensor/parallel/pipeline/simulate.hpp>

#include <cmath>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// A row for each rank and a box for each action, as long as it takes, with the number of its microbatch. Stages of a rank differ in tint.
std::string to_svg(const Schedule& schedule, const Timeline& timeline);

// A unit of time is a millisecond.
std::string to_chrome_trace(const Schedule& schedule, const Timeline& timeline);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// Of a rank's first stage; later ones are lighter.
inline constexpr std::array<std::array<int, 3>, 4> kColors{{{66, 133, 214}, {38, 152, 124}, {240, 173, 64}, {122, 92, 190}}};
inline constexpr std::array<std::string_view, 4> kMeanings{"F forward", "I input gradient", "W weight gradient", "B backward"};

class Svg {
 public:
  Svg(const Schedule& schedule, const Timeline& timeline) : schedule_(schedule), timeline_(timeline), chunk_(schedule.stages(), 0) {
    std::vector<int> chunks(schedule.ranks.size(), 0);
    for (int stage = 0; stage < schedule.stages(); ++stage) chunk_[stage] = chunks[schedule.rank_of_stage[stage]]++;
    chunks_ = *std::ranges::max_element(chunks);
    double shortest = timeline.makespan;
    for_each_box([&](int, const Action& action, const TimeSpan& time) {
      if (time.end > time.start) shortest = std::min(shortest, time.end - time.start);
      for (const auto& part : Parts(action)) occurs_[static_cast<size_t>(part.kind)] = true;
    });
    const double whole = std::max(timeline.makespan, 1e-300);
    scale_ = std::clamp(kBox / std::max(shortest, 1e-300) * whole, kNarrowest, kWidest) / whole;
  }

  std::string draw() {
    const auto ranks = static_cast<double>(schedule_.ranks.size());
    const double width = std::max(kLeft + timeline_.makespan * scale_ + kRight, kLegendWidth), height = kTop + ranks * kRow + kBottom;
    text_ = joined({"<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", std::lround(width), "\" height=\"", std::lround(height),
                    "\" font-family=\"sans-serif\" font-size=\"12\">\n"});
    box(0, 0, width, height, "white", "/>\n");
    write(kLeft, 20, "start",
          joined({xml_escaped(schedule_.name), ": ", schedule_.ranks.size(), " ranks, ", schedule_.microbatches, " microbatches, makespan ",
                  number(timeline_.makespan), ", bubble ", number(std::round(1000 * timeline_.bubble()) / 10), " %"}),
          "font-weight=\"bold\"");
    for (size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      const double y = kTop + static_cast<double>(rank) * kRow;
      write(kLeft - 8, y + kRow / 2 + 2, "end", "rank " + std::to_string(rank));
      box(kLeft, y, timeline_.makespan * scale_, kRow - kGap, "#f0f0f0", "/>\n");
    }
    for_each_box([&](int rank, const Action& action, const TimeSpan& time) { draw_action(rank, action, time); });
    draw_axis(kTop + ranks * kRow + 14);
    draw_legend(kTop + ranks * kRow + 34);
    return std::move(text_) + "</svg>\n";
  }

 private:
  static constexpr double kLeft = 70, kRight = 20, kTop = 34, kBottom = 54, kRow = 28, kGap = 4, kBox = 20, kNarrowest = 600,
                          kWidest = 12000, kLegendWidth = 780;

  template <class Visit>
  void for_each_box(Visit visit) const {
    for (int rank = 0; rank < static_cast<int>(schedule_.ranks.size()); ++rank) {
      const auto& list = schedule_.ranks[rank];
      for (size_t i = 0; i < list.size(); ++i) {
        if (is_compute(list[i].kind)) visit(rank, list[i], timeline_.actions[rank][i]);
      }
    }
  }

  std::string color(Kind kind, int chunk) const {
    const double light = chunks_ > 1 ? 0.55 * chunk / (chunks_ - 1) : 0;
    std::array<int, 3> rgb{};
    for (int i = 0; i < 3; ++i) rgb[i] = static_cast<int>(kColors[static_cast<size_t>(kind)][i] * (1 - light) + 255 * light);
    std::string hex = "#";
    for (const int part : rgb) hex.append(1, "0123456789abcdef"[part / 16]).append(1, "0123456789abcdef"[part % 16]);
    return hex;
  }

  static std::string decimal(double value) { return number(std::round(value * 100) / 100); }

  void box(double x, double y, double width, double height, std::string_view fill, std::string_view rest) {
    text_ += joined({"<rect x=\"", decimal(x), "\" y=\"", decimal(y), "\" width=\"", decimal(width), "\" height=\"", decimal(height),
                     "\" fill=\"", fill, "\"", rest});
  }

  void write(double x, double y, std::string_view anchor, const std::string& content, std::string_view more = "") {
    text_ += joined({"<text x=\"", decimal(x), "\" y=\"", decimal(y), "\" text-anchor=\"", anchor, "\" ", more, ">", content, "</text>\n"});
  }

  void draw_action(int rank, const Action& action, const TimeSpan& time) {
    const double x = kLeft + time.start * scale_, width = (time.end - time.start) * scale_;
    const bool pair = action.kind == Kind::OVERLAP_F_B;
    const double height = (kRow - kGap) / (pair ? 2 : 1);
    double y = kTop + rank * kRow;
    for (const auto& part : Parts(action)) {
      const int chunk = chunk_[part.stage];
      box(x, y, width, height, color(part.kind, chunk),
          joined({" stroke=\"white\" stroke-width=\"", width > 4 ? "0.8" : "0", "\"><title>", text(action), " from ", number(time.start),
                  " to ", number(time.end), "</title></rect>\n"}));
      const auto microbatch = std::to_string(part.microbatch);
      const bool dark = chunk * 2 <= chunks_ - 1 && part.kind != Kind::W;
      if (width >= 7.0 * static_cast<double>(microbatch.size()) + 1) {
        write(x + width / 2, y + height / 2 + 4, "middle", microbatch,
              joined({"fill=\"", dark ? "white" : "#202020", "\" font-size=\"", pair ? 10 : 11, "\""}));
      }
      y += height;
    }
  }

  void draw_axis(double y) {
    const double ten = std::pow(10, std::floor(std::log10(std::max(timeline_.makespan, 1e-300))));
    double step = ten;
    for (const double part : {0.5, 0.2, 0.1}) step = timeline_.makespan / step < 8 ? part * ten : step;
    for (double at = 0; at <= timeline_.makespan * 1.0001; at += step)
      write(kLeft + at * scale_, y, "middle", number(at), "fill=\"#606060\"");
  }

  void draw_legend(double y) {
    double x = kLeft;
    for (size_t kind = 0; kind < kColors.size(); ++kind) {
      if (!occurs_[kind]) continue;
      for (int chunk = 0; chunk < chunks_; ++chunk, x += 16) {
        box(x, y, 14, 14, color(static_cast<Kind>(kind), chunk), "/>\n");
      }
      write(x + 4, y + 12, "start", std::string(kMeanings[kind]));
      x += 20 + 7.0 * static_cast<double>(kMeanings[kind].size());
    }
    if (chunks_ > 1) write(x + 4, y + 12, "start", "lighter: the rank's later stages", "fill=\"#606060\"");
  }

  const Schedule& schedule_;
  const Timeline& timeline_;
  std::vector<int> chunk_;  // of each stage, among those of its rank
  int chunks_ = 1;
  std::array<bool, kColors.size()> occurs_{};
  double scale_ = 1;
  std::string text_;
};

inline std::string json_escaped(std::string_view name) {
  std::string safe;
  for (const char letter : name) {
    if (letter == '"' || letter == '\\') safe += '\\';
    safe += static_cast<unsigned char>(letter) < ' ' ? ' ' : letter;
  }
  return safe;
}

}  // namespace detail

inline std::string to_svg(const Schedule& schedule, const Timeline& timeline) { return detail::Svg(schedule, timeline).draw(); }

inline std::string to_chrome_trace(const Schedule& schedule, const Timeline& timeline) {
  constexpr double kMicroseconds = 1000;
  auto json = detail::joined(
      {R"({"traceEvents":[{"name":"process_name","ph":"M","pid":0,"args":{"name":")", detail::json_escaped(schedule.name), R"("}})"});
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    json += detail::joined({",\n", R"({"name":"thread_name","ph":"M","pid":0,"tid":)", rank, R"(,"args":{"name":"rank )", rank, R"("}})"});
    const auto& list = schedule.ranks[rank];
    for (size_t i = 0; i < list.size(); ++i) {
      if (!is_compute(list[i].kind)) continue;
      const auto [start, end] = timeline.actions[rank][i];
      json += detail::joined({",\n", R"({"name":")", text(list[i]), R"(","cat":")", detail::kKindNames[static_cast<size_t>(list[i].kind)],
                              R"(","ph":"X","ts":)", detail::number(start * kMicroseconds), R"(,"dur":)",
                              detail::number((end - start) * kMicroseconds), R"(,"pid":0,"tid":)", rank, R"(,"args":{"stage":)",
                              list[i].stage, R"(,"microbatch":)", list[i].microbatch, "}}"});
    }
  }
  return json + "\n]}\n";
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
