// Random numbers on a mesh. Every random operator gives the values of one device, whatever the layout: each rank draws its shard of one
// stream. That is the stream of the rank's generator, which torch::manual_seed seeds.
#pragma once

#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/Generator.h>

#include <memory>

#pragma GCC visibility push(default)

namespace dtensor {

// A counter-based generator (Philox 4x32-10): each number is a function of the seed, of how many draws there were, and of the element's
// row-major index. So a rank draws its shard in the time that the shard takes, whatever the layout. The values are the same on every mesh
// and on one device, but not those of libtorch's generators.
//
// Pass it to an operator (x.normal_(0, 1, generator)), or use it for all draws of a rank: world.generator() = dt::Generator(seed).
// Operators whose libtorch kernel needs a generator of libtorch's own (randperm, poisson, multinomial with replacement) throw.
class Generator : public at::Generator {
 public:
  explicit Generator(uint64_t seed = 0);
};

namespace rng {
// The number in [0, 1), of 53 bits, that a dt::Generator(seed) gives the element of this index in the draw that so many came before, by
// uniform_ of a float64 tensor. For streams of one's own: a function of the three, which communicates nothing.
double uniform_at(uint64_t seed, uint64_t draw, int64_t index);
}  // namespace rng

// When ranks compare the generators that they draw distributed tensors from (8 bytes per rank). If ranks have drawn different amounts, or
// were seeded differently, an error on every rank names them.
enum class GeneratorCheck {
  off,
  first,   // the first 16 draws on each mesh, then those at powers of two and every 1024th; the default
  always,  // every draw; the default of debug builds
};

// Thread-local. The default can also be set by the environment: DTENSOR_CHECK_GENERATORS=0 (off), first, or 1 (always).
void set_generator_check(GeneratorCheck check);
GeneratorCheck generator_check();

// Compares the calling rank's generator with those of all ranks of `mesh`, now. Throws on every rank when they differ. Communicates 8 bytes
// per rank.
void check_generators(const DeviceMesh& mesh);

// While it lives, the calling rank draws from a stream of its own, for data augmentation. torch::manual_seed seeds that stream together
// with the rank. It goes on where the last such region ended, and the common stream stands still.
//
// Spmd is suspended: factories make plain tensors. A draw on a DTensor gives each rank other numbers in its shard, and throws for a
// replicated one. Regions end in any order, as those of Spmd do.
class [[nodiscard]] RankLocalRandom {
 public:
  RankLocalRandom();
  ~RankLocalRandom();
  RankLocalRandom(const RankLocalRandom&) = delete;
  RankLocalRandom& operator=(const RankLocalRandom&) = delete;

  // Whether the calling thread is inside such a region.
  static bool active();

 private:
  NoSpmd no_spmd_;
  std::shared_ptr<detail::Region> region_;
};

inline RankLocalRandom rank_local_random() { return {}; }

}  // namespace dtensor

#pragma GCC visibility pop
