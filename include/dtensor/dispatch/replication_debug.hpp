// Finds operators that every rank computed whole although they could have been sharded. They are right, but cost speed without notice.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

// While it lives, counts the operators of this thread that ran whole on every rank of a mesh dimension although an operand was sharded
// along it, and was gathered for that. Communicates nothing. When nested, only the innermost counts.
//
//   dt::ReplicationDebugMode whole;
//   model->forward(batch);
//   std::cout << whole.str();
class ReplicationDebugMode {
 public:
  struct Totals {
    int64_t count = 0;
    int64_t bytes = 0;  // of the gathered operands
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

  // A table with one line per operator and operands, most bytes first.
  std::string str() const;

 private:
  ReplicationDebugMode* outer_;
  std::map<Line, Totals> lines_;
};

// Turns warnings of such calls on or off, for the process. The mesh's first rank warns on standard error of the first such call of each
// operator and kind of operands, if it gathers at least 64 KiB; at most eight times in a process, and not while a ReplicationDebugMode
// counts. On by default; DTENSOR_WARN_REPLICATED=0 turns it off. Setting it forgets the warnings given so far.
void set_replication_warnings(bool on);
bool replication_warnings();

}  // namespace dtensor

#pragma GCC visibility pop
