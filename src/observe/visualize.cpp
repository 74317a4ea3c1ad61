// Pictures of layouts. A rank's shard is a product of intervals, some for each dim. The ends of all ranks' intervals cut the tensor into
// cells; a rank holds a cell either whole or not at all.
#include <dtensor/observe/visualize.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <range/v3/action/push_back.hpp>
#include <range/v3/numeric/iota.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <ranges>
#include <set>

namespace dtensor {

namespace {

constexpr size_t kWidest = 16;     // cells across, and down, of a grid as text
constexpr size_t kMostLines = 64;  // of a list of regions

using Ranks = std::vector<int64_t>;  // positions in the mesh, ascending

// One dim, cut wherever a rank's share begins or ends.
struct Axis {
  std::vector<Interval> cells;
  std::vector<Ranks> holders;  // per cell
};

Axis axis_of(const Layout& layout, int64_t dim) {
  const auto ranks = layout.mesh().size();
  std::vector<Intervals> held;
  std::set<int64_t> bounds{0, layout.sizes()[dim]};
  for (int64_t r = 0; r < ranks; ++r) {
    held.push_back(layout.intervals(dim, layout.mesh().coordinate_of(r)));
    for (const auto& part : held.back()) bounds.insert({part.begin, part.end});
  }
  Axis axis;
  for (auto it = bounds.begin(); std::next(it) != bounds.end(); ++it) axis.cells.push_back({*it, *std::next(it)});
  if (axis.cells.empty()) axis.cells.push_back({0, 0});  // a dim without elements
  axis.holders.resize(axis.cells.size());
  for (int64_t r = 0; r < ranks; ++r) {
    for (const auto& part : held[r]) {
      auto cell = std::ranges::lower_bound(axis.cells, part.begin, {}, &Interval::begin);
      for (; cell != axis.cells.end() && cell->begin < part.end; ++cell) axis.holders[cell - axis.cells.begin()].push_back(r);
    }
  }
  return axis;
}

Ranks common(const Ranks& a, const Ranks& b) {
  Ranks both;
  std::ranges::set_intersection(a, b, std::back_inserter(both));
  return both;
}

Ranks everyone(const Layout& layout) {
  Ranks all(layout.mesh().size());
  ranges::iota(all, 0);
  return all;
}

// "0 1 2 7", or "0-3 7" where runs are long; "0+1+2+7", or "0+...+3+7".
std::string list_of(const std::vector<int>& ranks, const char* between) {
  const auto* run = *between == '+' ? "+...+" : "-";
  std::vector<std::string> texts;
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (j - i < 3) j = i;
    texts.push_back(i == j ? fmt::format("{}", ranks[i]) : fmt::format("{}{}{}", ranks[i], run, ranks[j]));
    i = j + 1;
  }
  return fmt::format("{}", fmt::join(texts, between));
}

// The holders of a region by world rank; those whose values combine into it are joined by "+".
std::string names_of(const Layout& layout, const Ranks& holders) {
  const auto& mesh = layout.mesh();
  std::map<std::vector<int64_t>, std::vector<int>> copies;  // by coordinate, that along Partial dimensions left out
  for (const auto r : holders) {
    auto coordinate = mesh.coordinate_of(r);
    for (int64_t m = 0; m < mesh.ndim(); ++m) {
      if (layout.placements()[m].is_partial()) coordinate[m] = 0;
    }
    copies[coordinate].push_back(mesh.ranks()[r]);
  }
  if (!layout.has_partial()) {
    std::vector<int> all;
    for (const auto& [coordinate, ranks] : copies) ranges::push_back(all, ranks);
    std::ranges::sort(all);
    return all.empty() ? "-" : list_of(all, " ");
  }
  std::vector<std::string> texts;
  for (const auto& [coordinate, ranks] : copies) texts.push_back(list_of(ranks, "+"));
  return texts.empty() ? "-" : fmt::format("{}", fmt::join(texts, " "));
}

std::string text_of(const Interval& interval) { return fmt::format("{}:{}", interval.begin, interval.end); }

// Ranks that hold nothing, and what "+" means.
std::string notes(const Layout& layout) {
  std::string text;
  std::vector<int> idle;
  for (const auto r : everyone(layout)) {
    if (layout.boxes(layout.mesh().coordinate_of(r)).empty()) idle.push_back(layout.mesh().ranks()[r]);
  }
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    if (layout.sizes()[d] == 0) return "no elements\n";
  }
  if (!idle.empty()) text += fmt::format("ranks {} hold nothing\n", list_of(idle, " "));
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    if (!layout.placements()[m].is_partial()) continue;
    text +=
        fmt::format("+ along {}: the value is the {} of what the ranks hold\n", layout.mesh().names()[m], name(layout.placements()[m].op));
  }
  return text;
}

// -- Text ----------------------------------------------------------------------------------------------------------------------

using Table = std::vector<std::vector<std::string>>;

std::string aligned(const Table& table) {
  std::vector<size_t> widths(table[0].size());
  for (const auto& row : table) {
    for (auto&& [width, cell] : ranges::views::zip(widths, row)) width = std::max(width, cell.size());
  }
  std::string text;
  for (const auto& row : table) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{}{:<{}}", i ? " | " : "", row[i], widths[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string grid(const Layout& layout, const Axis& down, const Axis& across) {
  Table table(1, {""});
  for (const auto& cell : across.cells) table[0].push_back(text_of(cell));
  for (const auto& [cell, row] : ranges::views::zip(down.cells, down.holders)) {
    table.push_back({layout.ndim() > 1 ? text_of(cell) : ""});
    for (const auto& column : across.holders) table.back().push_back(names_of(layout, common(row, column)));
  }
  return aligned(table);
}

// One line per region that some ranks hold alike: its intervals in every dim.
std::string list(const Layout& layout) {
  std::map<std::vector<std::string>, Ranks> regions;
  std::vector<std::vector<std::string>> order;
  for (const auto r : everyone(layout)) {
    const auto coordinate = layout.mesh().coordinate_of(r);
    if (layout.boxes(coordinate).empty()) continue;
    std::vector<std::string> region;
    for (int64_t d = 0; d < layout.ndim(); ++d) {
      std::vector<std::string> parts;
      const auto intervals = layout.intervals(d, coordinate);
      for (const auto& interval : intervals | std::views::take(4)) parts.push_back(text_of(interval));
      if (intervals.size() > 4) parts.push_back(fmt::format("... {} more", intervals.size() - 4));
      region.push_back(fmt::format("{}", fmt::join(parts, " ")));
    }
    auto& holders = regions[region];
    if (holders.empty()) order.push_back(region);
    holders.push_back(r);
  }
  Table table(1);
  for (int64_t d = 0; d < layout.ndim(); ++d) table[0].push_back(fmt::format("dim {}", d));
  table[0].push_back("ranks");
  for (const auto& region : order | std::views::take(kMostLines)) {
    table.push_back(region);
    table.back().push_back(names_of(layout, regions[region]));
  }
  auto text = aligned(table);
  if (order.size() > kMostLines) text += fmt::format("... {} more regions\n", order.size() - kMostLines);
  return text;
}

// One line per part, and the ranks that hold it.
std::string list_flat(const Layout& layout) {
  Table table{{"elements", "of", "ranks"}};
  std::map<std::vector<std::string>, Ranks> parts;
  std::vector<std::vector<std::string>> order;
  for (const auto r : everyone(layout)) {
    const auto coordinate = layout.mesh().coordinate_of(r);
    const auto part = layout.flat_shard(coordinate);
    if (part.length() == 0) continue;
    std::vector<std::string> rest;
    for (int64_t d = 0; d < layout.ndim(); ++d) {
      const auto held = layout.intervals(d, coordinate);
      std::vector<std::string> pieces;
      for (const auto& interval : held) pieces.push_back(text_of(interval));
      rest.push_back(fmt::format("{}", fmt::join(pieces, " ")));
    }
    std::vector<std::string> line{text_of(part), fmt::format("[{}]", fmt::join(rest, ", "))};
    auto& holders = parts[line];
    if (holders.empty()) order.push_back(line);
    holders.push_back(r);
  }
  for (const auto& line : order | std::views::take(kMostLines)) {
    table.push_back(line);
    table.back().push_back(names_of(layout, parts[line]));
  }
  auto text = aligned(table);
  if (order.size() > kMostLines) text += fmt::format("... {} more parts\n", order.size() - kMostLines);
  return text;
}

// A flat tensor as one row of elements.
LayoutPtr as_row(const Layout& layout) {
  const auto elements = c10::multiply_integers(layout.sizes());
  auto coordinate = layout.mesh().coordinate().vec();
  const auto m = layout.flat_dim();
  std::vector<int64_t> lengths;
  for (coordinate[m] = 0; coordinate[m] < layout.mesh().size(m); ++coordinate[m]) lengths.push_back(layout.flat_shard(coordinate).length());
  Placements placements(layout.placements().begin(), layout.placements().end());
  placements[m] = elements == 0 ? replicate() : ragged_shard(0, lengths);
  for (const auto& p : placements) {
    require(!p.is_shard() || p == placements[m], "visualize_svg",
            "cannot draw {}, which is flat over cuts; hint: visualize() lists its parts", layout.str());
  }
  return Layout::get(layout.mesh(), placements, {elements}, layout.dtype());
}

// The whole as one cell: for dims that there are not.
Axis single(const Layout& layout) { return {{{0, 1}}, {everyone(layout)}}; }

const Layout& layout_of(const char* tag, const at::Tensor& tensor) {
  require(is_dtensor(tensor), tag, "expected a distributed tensor; hint: make one with distribute_tensor or from_local");
  return DTensor(tensor).layout();
}

// -- SVG -----------------------------------------------------------------------------------------------------------------------

// The dims that are drawn, down and across: those that are cut first.
std::array<int64_t, 2> drawn_dims(const Layout& layout) {
  std::vector<int64_t> dims;
  for (const bool cut : {true, false}) {
    for (int64_t d = 0; d < layout.ndim(); ++d) {
      const bool is_cut = std::ranges::any_of(layout.placements(), [&](const auto& p) { return p.is_shard(d); });
      if (is_cut == cut) dims.push_back(d);
    }
  }
  dims.resize(std::min<size_t>(dims.size(), 2));
  std::ranges::sort(dims);
  if (dims.size() < 2) return {-1, dims.empty() ? -1 : dims[0]};
  return {dims[0], dims[1]};
}

std::string colour(int64_t rank) { return fmt::format("hsl({}, 60%, 78%)", rank < 0 ? 0 : rank * 137 % 360); }

// Where bounds lie on a line of `length` pixels: in proportion, with room for a label where there are few.
std::vector<double> positions(const Axis& axis, double length) {
  const double whole = static_cast<double>(std::max<int64_t>(axis.cells.back().end, 1));
  const double least = std::min(28.0, length / static_cast<double>(axis.cells.size()));
  const double rest = length - least * static_cast<double>(axis.cells.size());
  std::vector<double> at{0};
  for (const auto& cell : axis.cells) at.push_back(at.back() + least + rest * static_cast<double>(cell.length()) / whole);
  return at;
}

}  // namespace

std::string visualize(const Layout& layout) {
  auto text = layout.str() + "\n";
  if (layout.is_flat()) return text + list_flat(layout) + notes(layout);
  if (layout.ndim() <= 2) {
    const auto down = layout.ndim() < 2 ? single(layout) : axis_of(layout, 0);
    const auto across = layout.ndim() < 1 ? single(layout) : axis_of(layout, layout.ndim() - 1);
    if (down.cells.size() <= kWidest && across.cells.size() <= kWidest) return text + grid(layout, down, across) + notes(layout);
  }
  return text + list(layout) + notes(layout);
}

std::string visualize(const at::Tensor& tensor) { return visualize(layout_of("visualize", tensor)); }

void visualize_svg(const Layout& whole, const std::string& path) {
  const auto in_a_row = whole.is_flat() ? as_row(whole) : LayoutPtr();
  const auto& layout = in_a_row ? *in_a_row : whole;
  const auto [dim_down, dim_across] = drawn_dims(layout);
  const auto down = dim_down < 0 ? single(layout) : axis_of(layout, dim_down);
  const auto across = dim_across < 0 ? single(layout) : axis_of(layout, dim_across);
  const auto x = positions(across, 640), y = positions(down, dim_down < 0 ? 60 : 320);
  std::ofstream file(path);
  file << fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"740\" height=\"{:.0f}\" font-family=\"sans-serif\" font-size=\"11\">\n"
      "<text x=\"80\" y=\"20\">{}</text>\n",
      y.back() + 60, layout.str());
  for (size_t j = 0; j < across.cells.size() && dim_across >= 0; ++j) {
    file << fmt::format("<text x=\"{:.1f}\" y=\"42\">{}</text>\n", 80 + x[j], text_of(across.cells[j]));
  }
  for (size_t i = 0; i < down.cells.size(); ++i) {
    if (dim_down >= 0)
      file << fmt::format("<text x=\"75\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", 62 + y[i], text_of(down.cells[i]));
    for (size_t j = 0; j < across.cells.size(); ++j) {
      const auto holders = common(down.holders[i], across.holders[j]);
      file << fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" stroke=\"white\"/>\n", 80 + x[j],
                          48 + y[i], x[j + 1] - x[j], y[i + 1] - y[i],
                          holders.empty() ? "none" : colour(layout.mesh().ranks()[holders[0]]));
      file << fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", 84 + x[j], 62 + y[i], names_of(layout, holders));
    }
  }
  file << "</svg>\n";
  file.close();
  require(!file.fail(), "visualize_svg", "cannot write {}", path);
}

void visualize_svg(const at::Tensor& tensor, const std::string& path) { visualize_svg(layout_of("visualize_svg", tensor), path); }

}  // namespace dtensor
