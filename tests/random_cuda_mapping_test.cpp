// Which words libtorch's CUDA kernels give to which element, by formula, against going through their loops thread by thread.
#include "catch.hpp"

#include "rng/cuda/mapping.hpp"

#include <array>
#include <vector>

using namespace dtensor::rng;
using cuda::Device;

namespace {

constexpr uint64_t kSeed = 0x1234567890abcdef, kOffset = 12;

// curandStatePhilox4_32_10_t after curand_init(seed, subsequence, offset), for offsets that are multiples of four.
struct State {
  uint64_t subsequence, counter = kOffset / 4;
  std::array<uint32_t, 4> curand4() {
    const auto block = philox4x32_10(kSeed, counter++, subsequence);
    return {block.word[0], block.word[1], block.word[2], block.word[3]};
  }
};

using Numbers = std::vector<std::array<uint32_t, 2>>;  // an element's word, or two of a wide one

// distribution_elementwise_grid_stride_kernel.
Numbers by_threads(int64_t numel, bool wide, const Device& device) {
  const int64_t blocks = std::min((numel + 255) / 256, device.multiprocessors * (device.threads_of_each / 256)), threads = 256 * blocks;
  const int64_t unroll = wide ? 2 : 4, rounded = ((numel - 1) / (threads * unroll) + 1) * threads * unroll;
  Numbers numbers(numel);
  for (int64_t thread = 0; thread < threads; ++thread) {
    State state{static_cast<uint64_t>(thread)};
    for (int64_t index = thread; index < rounded; index += threads * unroll) {
      const auto words = state.curand4();
      for (int64_t i = 0; i < unroll; ++i) {
        const int64_t element = index + threads * i;
        if (element >= numel) continue;
        numbers[element] = wide ? std::array<uint32_t, 2>{words[2 * i], words[2 * i + 1]} : std::array<uint32_t, 2>{words[i], 0};
      }
    }
  }
  return numbers;
}

// fused_dropout_kernel_vec, or fused_dropout_kernel where nothing above 1 divides.
Numbers by_dropout_threads(int64_t numel, const Device& device) {
  const int64_t vector = numel % 4 == 0 ? 4 : numel % 2 == 0 ? 2 : 1;
  if (vector == 1) return by_threads(numel, false, device);
  const int64_t threads = 256 * std::min((numel + 255) / 256, device.multiprocessors * (device.threads_of_each / 256));
  Numbers numbers(numel);
  for (int64_t thread = 0; thread < threads; ++thread) {
    State state{static_cast<uint64_t>(thread)};
    std::array<uint32_t, 4> words{};
    bool second_half = false;
    for (int64_t index = thread * vector; index < numel; index += threads * vector) {
      if (vector == 4 || !second_half) {
        words = state.curand4();
      } else {
        words = {words[2], words[3], 0, 0};
      }
      if (vector == 2) second_half = !second_half;
      for (int64_t i = 0; i < vector; ++i) numbers[index + i] = {words[i], 0};
    }
  }
  return numbers;
}

Numbers by_formula(int64_t numel, bool wide, const cuda::Launch& launch) {
  Numbers numbers(numel);
  for (int64_t element = 0; element < numel; ++element) {
    const auto place = cuda::place_of(element, launch);
    const auto block = cuda::block_at(place, kSeed, kOffset);
    if (wide) {
      numbers[element] = {block.word[2 * place.component], block.word[2 * place.component + 1]};
    } else {
      numbers[element] = {block.word[place.component], 0};
    }
  }
  return numbers;
}

// Below, at and far above what the threads take in one call, in one round, and in several.
const std::vector<int64_t> kNumels = {1, 255, 256, 1000, 1536, 1537, 3072, 6144, 6145, 9999, 30002, 49152, 100003};

}  // namespace

TEST_CASE("random cuda mapping: a part draws the words of one GPU", "[random]") {
  for (const auto& device : {Device{3, 512}, Device{2, 1536}, Device{1, 2048}}) {
    for (const auto numel : kNumels) {
      for (const bool wide : {false, true}) {
        INFO(numel << " elements, " << (wide ? "64" : "32") << " bits, " << device.multiprocessors << " multiprocessors");
        REQUIRE((by_formula(numel, wide, cuda::distribution(numel, wide, device)) == by_threads(numel, wide, device)));
      }
      INFO("dropout of " << numel);
      REQUIRE((by_formula(numel, false, cuda::dropout(numel, device)) == by_dropout_threads(numel, device)));
    }
  }
}

TEST_CASE("random cuda mapping: the generator goes on as one GPU's", "[random]") {
  const Device h100{132, 2048};
  REQUIRE(cuda::distribution(1, false, h100).advance == 4);
  REQUIRE(cuda::distribution(270336, false, h100).threads == 270336);
  REQUIRE(cuda::distribution(4 * 270336, false, h100).advance == 4);
  REQUIRE(cuda::distribution(4 * 270336 + 1, false, h100).advance == 8);
  REQUIRE(cuda::distribution(2 * 270336, true, h100).advance == 4);
  REQUIRE(cuda::distribution(2 * 270336 + 1, true, h100).advance == 8);
  REQUIRE(cuda::distribution(2 * 270336 + 1, true, h100, false).advance == 4);
  // As many as the threads call for, so that two draws never share words.
  for (const auto numel : kNumels) {
    const Device device{3, 512};
    for (const bool wide : {false, true}) {
      const auto launch = cuda::distribution(numel, wide, device);
      uint64_t calls = 0;
      for (int64_t element = 0; element < numel; ++element) calls = std::max(calls, cuda::place_of(element, launch).call + 1);
      REQUIRE(launch.advance == 4 * calls);
    }
  }
}
