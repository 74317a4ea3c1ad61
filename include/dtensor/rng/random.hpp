// Random numbers on a mesh. Every random operator gives the values of one device, whatever the layout: ranks draw their parts of one
// stream, that of their own generator, which torch::manual_seed seeds.
#pragma once

#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/Generator.h>

#include <memory>

namespace dtensor {

// A generator of which every number is a function of its seed, of how many draws there were, and of the element's row-major index:
// Philox 4x32-10. A rank draws its part in the time of the part, whatever the layout, with the bits of one device, which are not those of
// libtorch's generators. Given to an operator (x.normal_(0, 1, generator)), or to all of a rank's: world.generator() =
// dt::Generator(seed). Where libtorch's kernels ask for a generator of their own (randperm, poisson, multinomial with replacement), they
// throw.
class Generator : public at::Generator {
 public:
  explicit Generator(uint64_t seed = 0);
};

// When the generators that ranks draw distributed tensors from are compared (8 bytes per rank). Ranks that have drawn different
// amounts, or seeded differently, are named in an error on every rank.
enum class GeneratorCheck {
  off,
  first,   // the first 16 draws on each mesh, then those at powers of two and every 1024th; the default
  always,  // every draw; the default of debug builds
};

// Thread-local. The default can also be set by the environment: DTENSOR_CHECK_GENERATORS=0 (off), first, or 1 (always).
void set_generator_check(GeneratorCheck check);
GeneratorCheck generator_check();

// Compares the calling rank's generator with those of all ranks of `mesh`, now. Throws on every rank when they differ. Communicates 8
// bytes per rank.
void check_generators(const DeviceMesh& mesh);

// While it lives, the calling rank draws from a stream of its own, seeded by torch::manual_seed together with its rank, which goes on
// where the last such region ended; the common stream stands still. For data augmentation. Spmd is suspended: factories make plain
// tensors. Draws on DTensors give each rank its own part, and throw for replicated ones. Ends as Spmd does, in any order.
class [[nodiscard]] RankLocalRandom {
 public:
  RankLocalRandom();
  ~RankLocalRandom();
  RankLocalRandom(const RankLocalRandom&) = delete;
  RankLocalRandom& operator=(const RankLocalRandom&) = delete;

  // Whether the calling thread is inside of one.
  static bool active();

 private:
  NoSpmd no_spmd_;
  std::shared_ptr<detail::Region> region_;
};

inline RankLocalRandom rank_local_random() { return {}; }

}  // namespace dtensor
