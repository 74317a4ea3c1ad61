// The part of a schedule that an error is about, as a grid: a row for each rank.
#pragma once

#include <dtensor/parallel/pipeline/schedule.hpp>

#include <algorithm>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// The action of a rank, from 0.
struct Place {
  int rank = 0;
  int position = 0;
};

// What stands around `places`, which are marked with > <: a row of each of their ranks and, where there is only one, of the two ranks on
// either side of it at the same positions.
std::string grid_around(const Schedule& schedule, const std::vector<Place>& places);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr int kColumnsAround = 4, kRowsAround = 2, kMostRows = 8;

// A text among blanks, `before` of them on its left.
inline std::string padded(std::string text, size_t width, double before) {
  const auto blanks = width > text.size() ? width - text.size() : 0;
  const auto left = static_cast<size_t>(before * static_cast<double>(blanks));
  return std::string(left, ' ') + std::move(text) + std::string(blanks - left, ' ');
}

inline std::string grid_row(const Schedule& schedule, const Place& middle, bool marked, size_t width) {
  const auto& list = schedule.ranks[middle.rank];
  const int first = std::max(0, middle.position - kColumnsAround);
  auto row = "  rank " + padded(std::to_string(middle.rank), 3, 0) + " from action " + padded(std::to_string(first), 4, 0);
  for (int i = first; i <= middle.position + kColumnsAround && i < static_cast<int>(list.size()); ++i) {
    const bool mark = marked && i == middle.position;
    row += padded(mark ? ">" + text(list[i]) + "<" : text(list[i]), width, 0.5);
  }
  return row.substr(0, row.find_last_not_of(' ') + 1) + "\n";
}

}  // namespace detail

inline std::string grid_around(const Schedule& schedule, const std::vector<Place>& places) {
  auto rows = places;
  if (places.size() == 1) {
    const auto [rank, position] = places.front();
    rows.clear();
    const int last = std::min(static_cast<int>(schedule.ranks.size()) - 1, rank + detail::kRowsAround);
    for (int i = std::max(0, rank - detail::kRowsAround); i <= last; ++i) rows.push_back({i, position});
  }
  if (rows.size() > detail::kMostRows) rows.resize(detail::kMostRows);
  std::ranges::stable_sort(rows, {}, &Place::rank);
  size_t width = 6;
  for (const auto& [rank, position] : rows) {
    const auto& list = schedule.ranks[rank];
    for (int i = std::max(0, position - detail::kColumnsAround);
         i <= position + detail::kColumnsAround && i < static_cast<int>(list.size()); ++i) {
      width = std::max(width, text(list[i]).size() + 3);
    }
  }
  std::string grid;
  for (const auto& row : rows) {
    const bool marked = std::ranges::any_of(places, [&](const Place& place) { return place.rank == row.rank; });
    grid += detail::grid_row(schedule, row, marked, width);
  }
  return grid;
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
