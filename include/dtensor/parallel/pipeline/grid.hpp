// The part of a schedule that an error is about, as a grid: a row for each rank.
#pragma once

#include <dtensor/parallel/pipeline/schedule.hpp>

#include <algorithm>
#include <cstdlib>

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

inline constexpr int kColumnsAround = 4, kRowsAround = 2;
inline constexpr size_t kMostRows = 8;

// A text among blanks, `before` of them on its left.
inline std::string padded(std::string text, size_t width, double before) {
  const auto blanks = width > text.size() ? width - text.size() : 0;
  const auto left = static_cast<size_t>(before * static_cast<double>(blanks));
  return std::string(left, ' ') + std::move(text) + std::string(blanks - left, ' ');
}

// The actions around a place.
inline std::vector<Action> columns(const Schedule& schedule, const Place& middle) {
  const auto& list = schedule.ranks[middle.rank];
  std::vector<Action> shown;
  for (int i = std::max(0, middle.position - kColumnsAround); i <= middle.position + kColumnsAround; ++i) {
    if (i < static_cast<int>(list.size())) shown.push_back(list[i]);
  }
  return shown;
}

inline std::string grid_row(const Schedule& schedule, const Place& middle, bool marked, size_t width) {
  int position = std::max(0, middle.position - kColumnsAround);
  auto row = "  rank " + padded(std::to_string(middle.rank), 3, 0) + " from action " + padded(std::to_string(position), 4, 0);
  for (const auto& action : columns(schedule, middle)) {
    const bool mark = marked && position++ == middle.position;
    row += padded(mark ? ">" + text(action) + "<" : text(action), width, 0.5);
  }
  return row.substr(0, row.find_last_not_of(' ') + 1) + "\n";
}

}  // namespace detail

inline std::string grid_around(const Schedule& schedule, const std::vector<Place>& places) {
  const int ranks = static_cast<int>(schedule.ranks.size());
  std::vector<Place> rows;  // in the order of ranks
  std::vector<bool> marked;
  size_t width = 6;
  for (int rank = 0; rank < ranks && rows.size() < detail::kMostRows; ++rank) {
    for (const auto& place : places) {
      const bool beside = places.size() == 1 && std::abs(rank - place.rank) <= detail::kRowsAround;
      if (rank != place.rank && !beside) continue;
      rows.push_back({rank, place.position});
      marked.push_back(rank == place.rank);
      for (const auto& action : detail::columns(schedule, rows.back())) width = std::max(width, text(action).size() + 3);
      break;
    }
  }
  std::string grid;
  for (size_t i = 0; i < rows.size(); ++i) grid += detail::grid_row(schedule, rows[i], marked[i], width);
  return grid;
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
