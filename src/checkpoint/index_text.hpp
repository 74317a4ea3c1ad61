// What ranks tell the first one while a step is written, and the checks of an index.
#pragma once

#include "src/checkpoint/disk.hpp"

#include <dtensor/checkpoint/index.hpp>

#include <string>

namespace dtensor::checkpoints {

// An index of some pieces: that they are all there is not checked, and a piece may be in no file (-1). Throws dtensor::Error.
Index part_of_index_from(const std::string& text, const std::string& path);

// "an integer", "a list of texts", ...
std::string kind_of(const Value& value);

// Throws std::runtime_error, which names the tensor, unless the pieces of each are the tensor and lie in their files. Checksums may be
// missing.
void check_tensors(const Index& index);

// A file of an index. Throws std::runtime_error, "'path' is damaged: ...", where there is none, or one of another size than the index says.
// Memory for what an index describes is taken after that.
disk::File open_file(const Index& index, int32_t number);

// Compares the checksum of what stands before the data in it, if any is known. Throws std::runtime_error, "... 'path' is damaged: ...".
void check_header(const Index& index, int32_t number, const disk::File& file);

}  // namespace dtensor::checkpoints
