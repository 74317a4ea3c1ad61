// What was communicated, by collective, operator, mesh dimension and module.
#pragma once

#include <dtensor/comm/event.hpp>

#include <map>
#include <string>
#include <string_view>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor {

// Counts the collectives that this rank issues while it lives, whichever of its threads does, autograd's too. The library's own checks are
// not counted.
class CommDebugMode : public comm::Observer {
 public:
  CommDebugMode();
  ~CommDebugMode() override { stop_observing(); }

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
  // The same by module and collective. The module is the one whose named parameter an operator reads (see dtensor::name_module), a unit of
  // fully sharded parameters, or the innermost dt::Scope; empty: none is known.
  const std::map<std::pair<std::string, comm::Collective>, Totals>& modules() const { return modules_; }
  void reset() {
    lines_.clear();
    modules_.clear();
  }

  // A table, one line per (collective, operator, mesh dimension).
  std::string str() const;
  // A table, one line per (module, collective).
  std::string module_str() const;

 private:
  void on_issue(const comm::Event& event) override;
  std::map<Line, Totals> lines_;
  std::map<std::pair<std::string, comm::Collective>, Totals> modules_;
};

}  // namespace dtensor

#pragma GCC visibility pop
