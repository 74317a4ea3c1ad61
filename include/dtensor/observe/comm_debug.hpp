// What was communicated, by collective, operator and mesh dimension.
#pragma once

#include <dtensor/comm/record.hpp>

#include <map>
#include <string>
#include <string_view>
#include <tuple>

namespace dtensor {

// Counts the collectives that this thread issues while it lives. The library's own checks are not counted.
class CommDebugMode : public comm::Observer {
 public:
  struct Totals {
    int64_t count = 0;
    int64_t bytes = 0;  // of this rank's inputs
  };
  struct Line {
    comm::Collective kind{};
    std::string op;         // the operator that needed it; empty: asked for
    std::string group;      // the mesh dimension
    bool implicit = false;
    auto operator<=>(const Line&) const = default;
  };

  int64_t count() const;                       // of all collectives
  int64_t count(comm::Collective kind) const;
  int64_t bytes() const;
  int64_t bytes(comm::Collective kind) const;
  const std::map<Line, Totals>& lines() const { return lines_; }
  void reset() { lines_.clear(); }

  // A table, one line per (collective, operator, mesh dimension).
  std::string str() const;

 private:
  void on_issue(const comm::Record& record) override;
  std::map<Line, Totals> lines_;
};

}  // namespace dtensor
