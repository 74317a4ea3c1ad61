// The files of a step: what one rank writes, and the index of what all have written.
#pragma once

#include "src/checkpoint/saver.hpp"

#include <map>
#include <string>
#include <vector>

namespace dtensor::checkpoints {

// What an index says about who wrote it.
std::map<std::string, std::string> written_by(int ranks);

// Writes the rank's files into the step's folder, synced. Returns the rank's report: an index of them alone, with checksums. A piece in no
// file (-1) is the checksum of a replica.
Index write_files(const Job& job);

// The index of a step, of all ranks' reports. `job` is the first rank's. Throws std::runtime_error for values and replicas that differ.
Index join_reports(const Job& job, const std::vector<Index>& reports);

// Removes what other attempts left in a folder of a step: files of ours that the index does not name. The step is complete: that this fails
// is no failure of the save.
void remove_leftovers(const std::string& step_folder, const Index& index);

// Removes the files of ours in a folder of a step, the index first, and then the folder if nothing else is in it.
void remove_step_files(const std::string& step_folder);

}  // namespace dtensor::checkpoints
