// Who writes what of a checkpoint, and where in which file.
#pragma once

#include "src/checkpoint/holdings.hpp"

#include <string>
#include <vector>

namespace dtensor::checkpoints {

// A box of a tensor that one rank writes.
struct WrittenItem {
  std::string name;
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> sizes;  // of the tensor
  Box box;
  int64_t offset = 0;  // of its first byte in the file's data
  int64_t bytes = 0;
};

struct WrittenFile {
  std::vector<WrittenItem> items;  // one after the other, without gaps
  int64_t data_bytes = 0;
  std::string header;  // what stands before the data
};

// Every element is written by one rank. What several ranks hold alike is written by the one that has least to write so far, largest first,
// so no rank writes more than the largest such tensor more than another of its holders. Throws std::runtime_error where elements of a
// tensor are held by no rank, or by several that do not hold the same box.
//
// Returns the items of each rank, those of wide dtypes first, then by name, so that each lies at a multiple of its element's size.
std::vector<std::vector<WrittenItem>> share_out(const AllHoldings& all, int ranks);

// Cuts a rank's items into files of at most `most_bytes` of data, or of one item.
std::vector<WrittenFile> files_of(std::vector<WrittenItem> items, int64_t most_bytes);

// The name of an item in its file: the tensor's, with the box where it is not all of it: "layer.weight[0:2,4:8]".
std::string name_in_file(const WrittenItem& item);

}  // namespace dtensor::checkpoints
