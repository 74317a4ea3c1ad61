// One operator under everything: samples, dtypes, meshes and placements.
#pragma once

#include "tools/opcheck/check.hpp"

#include <nlohmann/json.hpp>

#include <functional>
#include <set>

namespace dtensor::opcheck {

struct Effort {
  size_t cases = 250;     // combinations of placements per sample and mesh, at most
  size_t drawn = 24;      // on a mesh of two dimensions
  size_t widened = 12;    // samples that are made from others; each has a fifth of the cases
  bool missed = true;     // look for legal placements that the rule moves
  bool quick = false;     // 3 ranks only, one dtype
  bool table = false;     // keep what every case did
  std::set<std::string> crashing = {};  // samples on which libtorch's own operator crashes
};

// What was found, as JSON: samples, cases, refused, wrong [..], missed [..], and for a table: rows [..].
// `tell` gets what is known before each stage, and before each step what is tried (see apart.cpp): libtorch itself may crash.
nlohmann::json examine(const Operator& op, const Effort& effort, const std::function<void(const nlohmann::json&)>& tell);

// The same for many, `jobs` at once, each in a process of its own, which may crash or hang. `progress` gets how many are done, and the
// name of the last.
std::vector<nlohmann::json> examine_apart(const std::vector<Operator>& operators, const Effort& effort, size_t jobs,
                                          const std::function<void(size_t, const std::string&)>& progress);

// Leaves of the missed placements those that say something new: not what another of the same operator implies with more operands
// whole, nor what an in-place form shares with its functional form.
void keep_simplest_misses(std::vector<nlohmann::json>& results);

// Why an operator takes no sample; empty: no reason is known.
std::string why_unsampled(const Operator& op);

// Why the rule moves what need not be moved; empty: no reason is known.
std::string reason_for(const std::string& base, const std::string& placements, const std::string& legal);

}  // namespace dtensor::opcheck
