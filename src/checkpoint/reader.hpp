// Reads what a plan says into tensors.
#pragma once

#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/read_plan.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/checkpoint/crc32c.hpp>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace dtensor::checkpoints {

// Of a view that has the elements of `all`, those of `box`.
at::Tensor part_of_view(const at::Tensor& all_view, const Box& all, const Box& box);
// Whether memory holds its elements as they are, row-major.
bool has_own_bits(const at::Tensor& x);
void copy_elements(const at::Tensor& to, const at::Tensor& from);

class Reader {
 public:
  // `tensors`: this rank's, by name; `wanted`: what all ranks hold of them.
  Reader(const Index& index, const std::map<std::string, at::Tensor>& tensors, const AllHoldings& wanted, const Everyone& everyone);

  // Every rank calls it. Returns the first problem of this rank; empty: all went well.
  std::string run(const ReadPlan& plan);

  const LoadCounts& counts() const { return counts_; }

 private:
  struct Target {
    Box box;
    at::Tensor view;
  };
  struct Share {  // of a chunk: what one rank wants, where it is in the chunk, and the whole part that has it
    Box box;
    ChunkPart part;
  };
  struct Parcel {  // what another rank wants of a chunk that this one reads, and where it is in the bytes that are sent
    Share share;
    int64_t begin;
  };
  using Parcels = std::map<const Chunk*, std::vector<Parcel>>;

  // Of chunks that this rank reads: what it sends of them, and how many bytes to each rank.
  Parcels parcels_of(const std::vector<const Chunk*>& chunks, std::vector<int64_t>& counts) const;
  // Puts a chunk into this rank's tensors, and parcels of it into the bytes that are sent, while it is in a cache.
  void read(const Chunk& chunk, const std::vector<Parcel>& parcels, char* sent);
  static void pack(const Chunk& chunk, const std::vector<Parcel>& parcels, void* data, char* sent);
  void check_sum(const Chunk& chunk, const void* data) const { compare_sums(chunk, crc32c(data, static_cast<size_t>(chunk.bytes()))); }
  void compare_sums(const Chunk& chunk, uint32_t sum) const;
  // What each rank has to itself of chunks: it reads that, and tells the chunk's reader what the bytes are in the checksum.
  void read_apart(const std::vector<Chunk>& chunks);
  uint32_t read_own(const Chunk& chunk);
  // A gap between what a rank wants is read over where a further call to the system would take longer.
  static constexpr int64_t kLongestGap = int64_t{16} << 10;
  void put(const Chunk& chunk, void* data);
  void* place_of(const Chunk& chunk);  // memory of this rank that is to be the chunk, byte for byte; null: there is none
  void unpack(const std::vector<const Chunk*>& chunks, const at::Tensor& received);
  std::vector<int64_t> to_receive(const std::vector<const Chunk*>& chunks) const;
  std::vector<Share> shares(const Chunk& chunk, int rank) const;
  const std::vector<Target>& targets(const std::string& name);
  const disk::File& file(int32_t number);

  const Index& index_;
  const std::map<std::string, at::Tensor>& tensors_;
  const AllHoldings& wanted_;
  const Everyone& everyone_;
  std::map<std::string, std::vector<Target>> targets_;
  std::map<int32_t, disk::File> files_;
  at::Tensor chunk_memory_, sent_;  // used again and again
  std::vector<char> gap_memory_ = std::vector<char>(kLongestGap);
  std::string problem_;
  LoadCounts counts_;
};

}  // namespace dtensor::checkpoints
