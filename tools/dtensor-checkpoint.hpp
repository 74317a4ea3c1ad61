// What the commands of dtensor-checkpoint share.
#pragma once

#include <dtensor/checkpoint/index.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace dtensor_checkpoint {

namespace dt = dtensor;
using dt::checkpoints::Index;

inline constexpr const char* kTag = "dtensor-checkpoint";

// Exit statuses: 0 all is well; 1 something is wrong or differs; 2 it was called wrongly.
inline constexpr int kWrong = 1, kMisused = 2;

// A step's folder, a run's folder (its newest step), or a file or folder of another library.
Index open_index(const std::string& path);

// Whether it is of another library.
bool is_foreign(const Index& index);

std::string in_units(int64_t bytes);

// The first of some names, and how many there are beside them: "a, b, c and 12 more".
std::string some_of(const std::vector<std::string>& names, size_t most = 4);

// Draws how far something is, on a terminal only.
class Progress {
 public:
  explicit Progress(int64_t all);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void operator()(int64_t done);

 private:
  const int64_t all_;
  const bool is_seen_;
  int shown_ = -1;
};

struct Conversion {
  std::string from, to, form;         // form: dtensor, hf, dcp or pt
  std::optional<std::string> part{};  // what the names begin with, and lose; nothing: see docs/checkpoint.md
  std::optional<int64_t> file_bytes{};
};

// Writes a checkpoint in another form, and says what was written and what was not.
void convert(const Conversion& wanted);

// Writes a checkpoint of many files as one of few, in the form that it has: of at most so many bytes each, where it can have several.
void merge(const std::string& from, const std::string& to, int64_t file_bytes);
inline constexpr int64_t kOneFile = std::numeric_limits<int64_t>::max();

// What differs between two checkpoints, of the names that match. Returns the exit status.
int diff(const std::string& first, const std::string& second, const std::string& pattern, size_t most);

}  // namespace dtensor_checkpoint
