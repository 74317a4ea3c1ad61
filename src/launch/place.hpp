// Finds where in the program an error was thrown.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace dtensor::detail {

// Adds the program's own frames to an error's text, innermost first, without those of libtorch and of this library. Frames have function
// names if the program was linked with -rdynamic; addr2line finds the line of source if it was compiled with -g. Does nothing if the stack
// is not known, or if neither DTENSOR_BACKTRACE=1 is set nor the program runs under dtensor-run.
void add_place(c10::Error& error);

// The return addresses of the stack where an error was thrown, the innermost first; none where the stack is not known.
std::vector<uint64_t> addresses_of(const c10::Error& error);

}  // namespace dtensor::detail
