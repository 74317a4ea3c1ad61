// Whether a program gives on a mesh what it gives on one device.
#pragma once

#include "plain.hpp"
#include "ranks.hpp"

namespace dtensor::fuzz {

struct Verdict {
  bool valid = true;    // false: the program does not run, or is not tame, on one device
  std::string failure;  // what differed; empty: nothing
  Outcome mesh;         // rank 0's
};

// One rank's run. Everything that the library throws is in the outcome; `broke`: this rank may have left a collective half done.
Outcome run_on_mesh(const Program& program, bool& broke);

// What differs between a rank's outcome and one device's; empty: nothing.
std::string difference(const Outcome& plain, const Outcome& mesh);

Verdict check(const Program& program, Ranks& ranks);

// The shortest program, found by leaving out and simplifying, that still fails within the time. `verdict` becomes its own.
Program shrink(Program program, Verdict& verdict, Ranks& ranks, double seconds);

}  // namespace dtensor::fuzz
