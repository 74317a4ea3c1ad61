// Who reads what of a checkpoint, and who gets it from whom.
#pragma once

#include "src/checkpoint/holdings.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace dtensor::checkpoints {

// Bytes of a file that one rank reads: whole chunks of a piece, as many elements in row-major order.
struct Chunk {
  const std::string* name = nullptr;  // of the saved tensor
  const SavedTensor* tensor = nullptr;
  const Piece* piece = nullptr;
  Interval elements;  // of the piece
  int reader = 0;
  int64_t round = 0;
  std::vector<int> wanted_by;  // ranks, ascending

  bool is_wanted_by(int rank) const { return std::ranges::find(wanted_by, rank) != wanted_by.end(); }
  int64_t bytes() const { return elements.length() * static_cast<int64_t>(c10::elementSize(tensor->dtype)); }
  int64_t offset() const { return piece->offset + elements.begin * static_cast<int64_t>(c10::elementSize(tensor->dtype)); }
};

struct ReadPlan {
  std::vector<Chunk> chunks;
  std::vector<Chunk> apart;         // each rank that wants some of it reads that straight to its place; `reader` compares the checksum
  int64_t rounds = 0;
  std::vector<bool> sends;          // by round: whether any rank sends another something
  std::vector<int> header_readers;  // by file: who reads what stands before the data
};

// Boxes of global elements that a chunk has, in its order, each with its position in the chunk.
struct ChunkPart {
  Box box;
  int64_t begin = 0;
};
std::vector<ChunkPart> parts_of(const Chunk& chunk);

// Bytes of a chunk that follow each other in its file, and in row-major memory of a box.
struct Run {
  int64_t begin = 0, bytes = 0;
};
// Those of `box`, which lies in `part`, in its order; and how long each of them is, which takes less time.
int64_t bytes_of_run(const ChunkPart& part, const Box& box, int64_t bytes_of_element);
std::vector<Run> runs_of(const ChunkPart& part, const Box& box, int64_t bytes_of_element);

// By file of the index: the ranks that see it, ascending. Empty: all ranks see all files.
using SeenBy = std::vector<std::vector<int>>;

// Every chunk of which any rank wants a part is read once: by one of the ranks that want it and see its file, or that see it, the one that
// has least to read so far. But where ranks want other bytes of it, in long runs, each reads its own. The same on every rank. Rounds are of
// `round_bytes` a rank.
ReadPlan plan_reads(const Index& index, const AllHoldings& wanted, int ranks, int64_t round_bytes, const SeenBy& seen_by = {});

}  // namespace dtensor::checkpoints
