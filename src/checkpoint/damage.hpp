// Finds out that a file was damaged before libtorch reads it.
#pragma once

#include <string>

namespace dtensor::files {

// Compares the checksum of each record of a file of torch::save, which is a zip archive. libtorch does not: it runs what it finds, and ends
// the process where that is no program. Returns what is wrong, or nothing; also for files that are no archive, which libtorch refuses.
std::string damage_of(const std::string& path);

// The record of a file of torch::save whose program libtorch would run to read it, or nothing. What torch::save writes has none; what
// Python's torch.jit.save writes may.
std::string program_in(const std::string& path);

}  // namespace dtensor::files
