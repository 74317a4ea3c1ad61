// Schedules as text: PyTorch's CSV files, a row for each rank and a cell for each action.
#pragma once

#include <dtensor/parallel/pipeline/schedule.hpp>

#include <cerrno>
#include <cstring>
#include <fstream>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Reads "0F0,0F1,0B0,0B1\n1F0,...", with messages or without; empty cells are waiting and mean nothing. A stage is on the rank
// whose row has most of its actions. Where a message names a stage that is not the next one ("0SEND_F0@2"), messages say which stage feeds
// which: those of other ranks that it is sent to, and on its own rank the next one. Paths of microbatches are not in a file. The schedule
// need not be right: check() says. Throws for cells that are no action.
Schedule from_csv(std::string_view text, std::string name = "csv");
std::string to_csv(const Schedule& schedule);

// The same from and to a file. Throw where it cannot be read or written.
Schedule load_csv(const std::string& file);
void save_csv(const Schedule& schedule, const std::string& file);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline void add_cell(Schedule& schedule, std::string_view cell, int row, int column) {
  cell = blanks_removed(cell);
  if (cell.size() > 1 && cell.front() == '"' && cell.back() == '"') cell = blanks_removed(cell.substr(1, cell.size() - 2));
  if (cell.empty()) return;
  const auto action = read_action(cell);
  if (!action) refuse({schedule.name, ": row ", row, ", cell ", column, ": ", no_action(cell)});
  schedule.ranks.back().push_back(*action);
}

// Which stages and microbatches the actions speak of.
inline void find_sizes(Schedule& schedule) {
  std::vector<int> most, count;  // actions of each stage: in the row with the most, in this row
  for (int rank = 0; rank < static_cast<int>(schedule.ranks.size()); ++rank) {
    std::ranges::fill(count, 0);
    for (const auto& action : schedule.ranks[rank]) {
      for (const auto& part : Parts(action)) {
        const auto stage = static_cast<size_t>(part.stage);
        if (count.size() <= stage) count.resize(stage + 1, 0), most.resize(stage + 1, 0), schedule.rank_of_stage.resize(stage + 1, -1);
        if (++count[stage] > most[stage]) most[stage] = count[stage], schedule.rank_of_stage[stage] = rank;
        schedule.microbatches = std::max(schedule.microbatches, part.microbatch + 1);
      }
    }
  }
}

// Which stage feeds which, where that is not the next one alone.
inline void find_edges(Schedule& schedule) {
  std::vector<StageEdge> edges;
  bool far = false;
  const auto add = [&](StageEdge edge) {
    if (std::ranges::find(edges, edge) == edges.end()) edges.push_back(edge);
  };
  for (int stage = 0; stage + 1 < schedule.stages(); ++stage) {
    if (schedule.rank_of_stage[stage] == schedule.rank_of_stage[stage + 1]) add({stage, stage + 1});
  }
  for (const auto& actions : schedule.ranks) {
    for (const auto& action : actions) {
      if (action.kind != Kind::SEND_F || other_end(action) <= action.stage || other_end(action) >= schedule.stages()) continue;
      far |= action.other_stage >= 0;
      add({action.stage, other_end(action)});
    }
  }
  if (far) schedule.edges = std::move(edges);
}

}  // namespace detail

inline Schedule from_csv(std::string_view text, std::string name) {
  Schedule schedule{std::move(name), 0, {}, {}};
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // which some editors put first
  text = text.substr(0, text.find_last_not_of(" \t\r\n") + 1);  // no rank for empty lines at the end
  for (int row = 1; !text.empty(); ++row) {
    const auto end = std::min(text.find('\n'), text.size());
    auto line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    schedule.ranks.emplace_back();
    for (int column = 1; !line.empty(); ++column) {
      const auto comma = std::min(line.find(','), line.size());
      detail::add_cell(schedule, line.substr(0, comma), row, column);
      line.remove_prefix(std::min(comma + 1, line.size()));
    }
  }
  detail::find_sizes(schedule);
  detail::find_edges(schedule);
  return schedule;
}

inline std::string to_csv(const Schedule& schedule) {
  std::string lines;
  for (const auto& list : schedule.ranks) {
    for (size_t i = 0; i < list.size(); ++i) lines += (i ? "," : "") + csv_text(list[i]);
    lines += "\n";
  }
  return lines;
}

inline Schedule load_csv(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::string text;
  for (std::array<char, 4096> bytes; in.read(bytes.data(), bytes.size()) || in.gcount() > 0;) text.append(bytes.data(), in.gcount());
  if (!in.eof() || in.bad())
    detail::refuse(
        {"cannot read '", file, "': ", std::strerror(errno), "; expected a CSV file of a schedule; hint: see docs/pipeline_schedules.md"});
  auto schedule = from_csv(text, file);
  if (schedule.ranks.empty())
    detail::refuse({"'", file, "' is empty; expected a row of actions for each rank; hint: see docs/pipeline_schedules.md"});
  return schedule;
}

inline void save_csv(const Schedule& schedule, const std::string& file) {
  std::ofstream out(file, std::ios::binary);
  out << to_csv(schedule) << std::flush;
  if (!out.good()) detail::refuse({"cannot write '", file, "': ", std::strerror(errno), "; expected a file; hint: does its folder exist?"});
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
