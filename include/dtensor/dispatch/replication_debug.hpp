// Work that every rank did whole, although it could have been parted: the silent loss of speed.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace dtensor {

// Counts, while it lives, the operators of this thread that ran whole on every rank of a mesh dimension although an operand came in cut
// along it and was gathered for that. Communicates nothing. Nests: the innermost counts.
//
//   dt::ReplicationDebugMode whole;
//   model->forward(batch);
//   std::cout << whole.str();
class ReplicationDebugMode {
 public:
  struct Totals {
    int64_t count = 0;
    int64_t bytes = 0;  // of the gathered operands, whole
  };
  struct Line {
    std::string op;        // "aten::add_.Tensor"
    std::string operands;  // "f32[64, 256] (R), f32[64, 256] (S(0))"
    auto operator<=>(const Line&) const = default;
  };

  ReplicationDebugMode();
  ~ReplicationDebugMode();
  ReplicationDebugMode(const ReplicationDebugMode&) = delete;
  ReplicationDebugMode& operator=(const ReplicationDebugMode&) = delete;

  int64_t count() const;
  int64_t bytes() const;
  const std::map<Line, Totals>& lines() const { return lines_; }
  void reset() { lines_.clear(); }
  void add(const std::string& op, const std::string& operands, int64_t bytes);

  // A table, one line per operator and operands, the most bytes first.
  std::string str() const;

 private:
  ReplicationDebugMode* outer_;
  std::map<Line, Totals> lines_;
};

// Whether the first such call of each operator and kind of operands is told on standard error, by the mesh's first rank: where it gathers
// at least 64 KiB, eight times in a process at most, and not while a ReplicationDebugMode counts. On by default;
// DTENSOR_WARN_REPLICATED=0 turns it off. Of the process. Setting it forgets what was told.
void set_replication_warnings(bool on);
bool replication_warnings();

}  // namespace dtensor
