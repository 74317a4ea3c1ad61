// What ranks tell the first one while a step is written.
#pragma once

#include <dtensor/checkpoint/index.hpp>

#include <string>

namespace dtensor::checkpoints {

// An index of some pieces: that they are all there is not checked, and a piece may be in no file (-1). Throws dtensor::Error.
Index part_of_index_from(const std::string& text, const std::string& path);

}  // namespace dtensor::checkpoints
