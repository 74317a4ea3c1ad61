// Where in the program an error was thrown.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace dtensor::detail {

// Adds the place to an error's text: the program's own frames, the innermost first, without those of libtorch and of this library. A frame
// has a function's name where the program was linked with -rdynamic; addr2line finds the line of source, in a program compiled with -g.
// Where nobody asked for it (DTENSOR_BACKTRACE=1, or a run under dtensor-run), or where the stack is not known, it does nothing.
void add_place(c10::Error& error);

// The return addresses of the stack where an error was thrown, the innermost first; none where the stack is not known.
std::vector<uint64_t> addresses_of(const c10::Error& error);

}  // namespace dtensor::detail
