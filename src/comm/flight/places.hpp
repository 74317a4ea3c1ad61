// Lines of source for the addresses of a stack, of this process or of one that has ended.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dtensor::comm::flight {

struct Place {
  std::string file;      // of source; of the program, where that is not known
  std::string line;      // a number, or what addr2line takes
  std::string function;  // empty: not known
  std::string str() const;  // "train.cpp:42 (in step)"
};

// The program's own frames among return addresses, the innermost first, without those of libtorch, of this library and its headers. `maps`:
// /proc/PID/maps of the process that they are from. addr2line finds the lines, in programs compiled with -g.
std::vector<Place> places_of(const std::vector<uint64_t>& stack, const std::string& maps);

}  // namespace dtensor::comm::flight
