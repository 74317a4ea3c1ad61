// Which words libtorch's CUDA kernels give to which element, by formula, against going through their loops thread by thread; and what else
// of the kernels runs on the CPU.
#include "tests/support/op_check.hpp"

#include "rng/counter_dispatch.hpp"
#include "rng/cuda/mapping.hpp"
#include "rng/cuda/shard_index.hpp"
#include "rng/memory_order.hpp"

#include <array>
#include <vector>

using namespace dtensor;
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
Numbers by_dropout_threads(int64_t numel, int64_t most, const Device& device) {
  int64_t vector = most;
  while (numel % vector != 0) vector /= 2;
  if (vector == 1) return by_threads(numel, false, device);
  const int64_t threads = 256 * std::min((numel + 255) / 256, device.multiprocessors * (device.threads_of_each / 256));
  Numbers numbers(numel);
  for (int64_t thread = 0; thread < threads; ++thread) {
    State state{static_cast<uint64_t>(thread)};
    for (int64_t index = thread * vector; index < numel; index += threads * vector) {
      for (int64_t first = 0; first < vector; first += 4) {
        const auto words = state.curand4();
        for (int64_t i = first; i < std::min(first + 4, vector); ++i) numbers[index + i] = {words[i - first], 0};
      }
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
const std::vector<int64_t> kNumels = {1, 255, 256, 1000, 1536, 1537, 3072, 6144, 6145, 9999, 30002, 49152, 81928, 100003};

}  // namespace

TEST_CASE("random cuda mapping: a part draws the words of one GPU", "[random]") {
  for (const auto& device : {Device{3, 512}, Device{2, 1536}, Device{1, 2048}}) {
    for (const auto numel : kNumels) {
      for (const bool wide : {false, true}) {
        INFO(numel << " elements, " << (wide ? "64" : "32") << " bits, " << device.multiprocessors << " multiprocessors");
        REQUIRE((by_formula(numel, wide, cuda::distribution(numel, wide, device)) == by_threads(numel, wide, device)));
      }
      for (const int64_t most : {2, 4, 8, 16}) {
        INFO("dropout of " << numel << " in up to " << most);
        REQUIRE((by_formula(numel, false, cuda::dropout(numel, device, most)) == by_dropout_threads(numel, most, device)));
      }
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

TEST_CASE("random cuda mapping: the place of an element of a part in the whole", "[random]") {
  REQUIRE_NOTHROW(test::on_mesh({2, 3}, [](const DeviceMesh& mesh) {
    const std::vector<Sizes> shapes = {{50}, {7, 30}, {6, 1, 48}, {24, 5, 4, 2}, {2, 3}, {1, 1}};
    for (const auto& sizes : shapes) {
      const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
      for (const auto& outer : {replicate(), shard(0), shard(last), strided_shard(last, 2)}) {
        if (outer.split > 1 && sizes.back() % 2 != 0) continue;
        for (const auto& inner : {replicate(), shard(0), shard(last)}) {
          for (const bool transposed : {false, true}) {
            const auto rows = at::arange(c10::multiply_integers(sizes)).view(sizes);
            const auto part =
                distribute_tensor(transposed ? rows.transpose(0, -1).contiguous().transpose(0, -1) : rows, mesh, {outer, inner});
            const auto& layout = part.layout();
            const auto order = memory_order(layout.strides());
            const auto index = cuda::shard_index(layout, order.data());
            require(index.has_value(), "test", "no index for {}", layout.str());
            const auto whole = Layout::get(mesh, Placements{replicate(), replicate()}, sizes, layout.strides(), at::kLong);
            const auto numbered = in_place(at::arange(rows.numel()), *whole, order);  // in the order of memory
            const auto local = own_shard(numbered, layout).permute(order).reshape(-1);
            for (int64_t i = 0; i < local.numel(); ++i) {
              require(index->global(i) == local[i].item<int64_t>(), "test", "element {} of {} is not at {}", i, layout.str(),
                      index->global(i));
            }
          }
        }
      }
    }
  }));
}

TEST_CASE("random cuda mapping: an element of a dt Generator alone", "[random]") {
  // What the kernels compute for each element, against the loops of the CPU.
  const CounterDraw draw{kSeed, 3};
  const std::vector<CounterNumbers> operators = {{"uniform_", -1, 2}, {"normal_", 0, 1},           {"log_normal_", 0, 1},
                                                 {"exponential_", 2}, {"geometric_", 0.3},         {"cauchy_", 0, 1},
                                                 {"bernoulli_", 0.4}, {"random_", 0, 0, -5, 1000}, {"random_", 0, 0, 0, uint64_t{1} << 40}};
  const auto check = [&](at::ScalarType dtype, const CounterNumbers& numbers) {
    const auto by_loops = at::empty({1003}, at::TensorOptions(dtype)), alone = at::empty({1003}, at::TensorOptions(dtype));
    const auto all = [](const std::function<void(const Interval&)>& visit) { visit({5, 1008}); };
    if (!fill(by_loops, all, draw, numbers)) return false;
    return with_numbers(dtype, numbers, [&]<class T>(T, const auto& of_type) {
      for (int64_t i = 0; i < 1003; ++i) alone.data_ptr<T>()[i] = static_cast<T>(number_at(of_type, draw, i + 5));
    }) && alone.equal(by_loops);
  };
  for (const auto& numbers : operators) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      INFO(numbers.name << " of " << c10::toString(dtype));
      REQUIRE(check(dtype, numbers));
    }
    if (numbers.name == "geometric_" || numbers.name == "bernoulli_" || numbers.name == "random_") REQUIRE(check(at::kLong, numbers));
  }
}
