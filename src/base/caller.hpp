// Who the calling thread is, for the texts of errors.
#pragma once

namespace dtensor::detail {

struct Caller {
  int rank = 0;
  int ranks = 0;  // 0: it is in no world
};

// Asks the layer that knows (src/mesh/world.cpp), which sets this while the library is loaded.
extern Caller (*caller)();

}  // namespace dtensor::detail
