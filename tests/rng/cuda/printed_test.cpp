// The numbers of rng/cuda, computed on the CPU, against those that PyTorch has printed on GPUs: in issues of its users, and in tutorials,
// notes and scripts that are public. A GPU and a CPU differ in the last bits of a logarithm, a sine and a cosine; four digits were printed.
// The sources name their GPUs, but for the RTX 3060 and 3090: those are the ones whose numbers of threads fit.
#include "tests/rng/cuda/numbers_on_host.hpp"

#include <ATen/ops/empty.h>

#include "tests/catch.hpp"  // after libtorch, which has a CHECK of its own

#include <cmath>
#include <map>
#include <vector>

using namespace dtensor::rng::cuda;

namespace {

const Device kK80{13, 2048}, kP100{56, 2048}, kA100{108, 2048}, kH100{132, 2048}, kA4000{48, 1536}, kA6000{84, 1536}, kRtx3060{28, 1536},
    kRtx3090{82, 1536}, kRtx4080Super{80, 1536};
const Device kAny = kA100;  // no element comes round

struct Draw {
  Numbers numbers;
  at::ScalarType dtype;
  uint64_t seed, offset;
  int64_t numel;
  Device gpu;

  Launch launch() const { return distribution(numel, numbers.wide, gpu); }
};

at::Tensor elements(const Draw& draw, const Launch& launch, int64_t first, int64_t count) {
  const auto result = at::empty({count}, draw.dtype);
  const ShardIndex part{1, {{count, draw.numel, 0, 1}}, {{0, first}}};
  REQUIRE(
      dtensor::test::draw_on_host({result.data_ptr(), draw.dtype, count, part, nullptr}, {draw.seed, draw.offset, launch}, draw.numbers));
  return result;
}

// Numbers that begin at an element; below zero: from the end.
using Printed = std::map<int64_t, std::vector<double>>;

void check(const char* source, const Draw& draw, const Printed& printed) {
  constexpr double kHalfADigit = 0.5e-4, kLastBits = 2e-6;
  for (const auto& [at, numbers] : printed) {
    const auto first = at < 0 ? draw.numel + at : at;
    const auto got = elements(draw, draw.launch(), first, static_cast<int64_t>(numbers.size())).to(at::kDouble);
    for (size_t i = 0; i < numbers.size(); ++i) {
      INFO(source << ": element " << first + static_cast<int64_t>(i));
      CHECK(std::abs(got[static_cast<int64_t>(i)].item<double>() - numbers[i]) <= kHalfADigit + kLastBits);
    }
  }
}

const Numbers kRand{Kind::uniform, 0, 1}, kRandn{Kind::normal, 0, 1};

}  // namespace

TEST_CASE("cuda printed: few elements") {
  check("github.com/pytorch/pytorch/issues/47347", {kRand, at::kFloat, 0, 0, 5, kAny}, {{0, {0.3990, 0.5167, 0.0249, 0.9401, 0.9459}}});
  check("github.com/pytorch/pytorch/issues/79496", {kRandn, at::kFloat, 10, 0, 3, kAny}, {{0, {-0.1029, 1.6810, -0.2708}}});
  check("notes: torch.randn(3, 3, 5, dtype=torch.half)", {kRandn, at::kHalf, 0, 0, 45, kAny},
        {{0, {-0.9248, -0.4253, -2.6445, 0.1451, -0.1208, -0.5796, -0.6230, -0.3284, -1.0742, -0.3630, -1.6709, 2.2656,
              0.3118,  -0.1842, 1.2871,  1.1816, -0.1271, 1.2168,  1.4355,  1.0605,  -0.4941, -1.4248, -0.7246, -1.2969,
              0.0697,  -0.0074, 1.8965,  0.6880, -0.0779, -0.8374, 1.3506,  -0.2878, -0.5967, -0.3284, -0.9087, -0.8062,
              -0.7407, -0.0504, 0.5435,  1.5146, 0.0141,  0.4531,  1.6348,  0.7124,  -0.1805}}});
  check("notes of a course: torch.randn of 8 x 8 doubles", {{Kind::normal, 0, 1, true}, at::kDouble, 0, 0, 64, kAny},
        {{0, {-0.3104, -0.0343, 0.1756,  -2.2804, 0.5039,  0.5596,  -0.0750, 0.9691,  -0.2357, -0.4582, 0.5661,
              1.2851,  -1.8667, -0.0312, 1.2433,  1.3689,  -1.0753, -0.0158, -1.4481, -1.3089, 0.6980,  -0.3300,
              -0.7708, -0.4946, 3.1702,  0.0387,  -1.5728, 1.2985,  -0.4419, -0.6965, -1.4002, -0.0884}}});
  check("a script: torch.randint(0, 100, (8,))", {{Kind::whole_from, 0, 0, false, 0, 100}, at::kLong, 0, 0, 8, kAny},
        {{0, {41, 97, 91, 72, 53, 4, 3, 33}}});
}

TEST_CASE("cuda printed: one draw after another") {
  // Triton's tutorial "Vector Addition" prints the sum of torch.rand(98432) and another.
  const Draw first{kRand, at::kFloat, 0, 0, 98432, kAny};
  Draw second = first;
  second.offset = first.launch().advance;
  for (const auto& [at, sums] : Printed{{0, {1.3713, 1.3076, 0.4940}}, {98429, {0.6724, 1.2141, 0.9733}}}) {
    const auto sum = elements(first, first.launch(), at, 3).add(elements(second, second.launch(), at, 3)).to(at::kDouble);
    for (int64_t i = 0; i < 3; ++i) CHECK(std::abs(sum[i].item<double>() - sums[i]) <= 0.5e-4);
  }
}

TEST_CASE("cuda printed: threads that go round") {
  const int64_t numel = 49 * 12 * 112 * 144;
  check("github.com/pytorch/pytorch/issues/143086", {kRandn, at::kFloat, 1, 0, numel, kA100},
        {{0, {-0.2963, 2.6764, -0.1408}}, {-3, {0.1549, -0.6797, -0.1656}}});
  check("github.com/pytorch/pytorch/issues/143086", {kRandn, at::kFloat, 1, 0, numel, kH100},
        {{0, {-0.2963, 2.6764, -0.1408}}, {-3, {-0.6970, -0.7780, 0.3267}}});
  check("github.com/pytorch/pytorch/issues/62467", {kRandn, at::kFloat, 43, 0, 3 * 128 * 128, kA6000},
        {{0, {1.9983}}, {128 * 128, {0.8704}}, {2 * 128 * 128, {2.1127}}});
  check("github.com/pytorch/pytorch/issues/97097", {{Kind::normal, 5, std::sqrt(5.0)}, at::kFloat, 14, 0, 1000 * 100, kA4000},
        {{0, {2.8731, 5.2727, 2.9889}},
         {97, {1.6853, 9.6331, 6.6319}},
         {100, {3.9968, 3.8097, 5.7328}},
         {197, {4.4029, 3.9804, 7.4698}},
         {200, {6.5552, 4.0857, 4.2315}},
         {297, {2.7704, 3.5479, 3.3063}},
         {99700, {8.6297, 2.3137, 6.2596}},
         {99797, {7.9358, 4.4697, 2.7475}},
         {99800, {7.0551, 7.8583, 3.9990}},
         {99897, {4.1139, 8.9315, 4.2042}},
         {99900, {2.7337, 2.2106, 7.7815}},
         {99997, {8.2207, 6.5395, 4.2604}}});
  check("github.com/pytorch/pytorch/issues/158398", {kRandn, at::kFloat, 42, 0, 64 * 2048, kRtx3060},
        {{0, {0.1940, 2.1614, -0.1721}},
         {2045, {1.4540, -2.7733, -0.8932}},
         {2048, {-0.4574, 0.8063, 0.1580}},
         {4093, {0.1124, 0.2769, -1.2535}},
         {4096, {1.1346, -0.6329, -0.9147}},
         {6141, {-1.0001, -1.1552, -0.6955}},
         {61 * 2048, {-0.4861, 0.3358, 1.0578}},
         {62 * 2048 - 3, {-0.7282, 0.5087, 0.1318}},
         {62 * 2048, {0.7881, 0.8339, -1.1424}},
         {63 * 2048 - 3, {-0.6297, -1.1112, -0.4091}},
         {63 * 2048, {-1.2356, -0.4083, -0.4695}},
         {64 * 2048 - 3, {-0.4841, 1.2850, -0.0282}}});
}

TEST_CASE("cuda printed: 64 million elements of half precision, and what is drawn after them") {
  // A script that takes rows of torch.randn(64, 1024, 1024) apart. The offset at which it drew their lengths leaves room for the parameters
  // of the layer that scripts of its kind draw in between, Linear(1024, 3072), and for nothing else.
  const int64_t row = 1024, last = 63 * 1024;
  const Draw rows{kRandn, at::kHalf, 0, 0, 64 * 1024 * row, kRtx3090};
  check("a script: rows", rows,
        {{0, {-0.9248, -0.4253, -2.6445}},
         {row - 3, {-1.2363, -1.1992, -0.1084}},
         {row, {-1.0322, -0.8892, -0.1914}},
         {2 * row - 3, {1.4658, -0.0562, 0.0457}},
         {2 * row, {1.4951, -1.5723, 0.3313}},
         {3 * row - 3, {-0.6592, 2.3184, 0.4822}},
         {(last + 1005) * row, {-0.7598, -0.2815, -1.7314}},
         {(last + 1006) * row - 3, {-0.5435, -0.4978, -1.1318}},
         {(last + 1006) * row, {-0.4604, 0.5435, 0.4023}},
         {(last + 1007) * row - 3, {-0.1267, -0.4702, 0.3462}},
         {(last + 1007) * row, {0.5518, 0.2021, -0.4985}},
         {(last + 1008) * row - 3, {-0.2632, 1.6035, 0.0717}}});
  uint64_t offset = rows.launch().advance;
  for (const int64_t numel : {3 * 1024 * 1024, 3 * 1024}) offset += distribution(numel, false, kRtx3090).advance;
  const std::vector<int64_t> ends = {1014,  2030,  3050,  4073,  5085,  6094,  7102,  8109,  9114,  10129, 11140, 12159, 13168,
                                     14188, 15206, 16211, 17219, 18224, 19240, 20249, 21255, 22274, 23296, 24301, 25307, 26317,
                                     27330, 28340, 29362, 30366, 31379, 32399, 33419, 34432, 35450, 36456, 37467, 38480, 39484,
                                     40505, 41517, 42540, 43555, 44569, 45579, 46598, 47610, 48618, 49623, 50629, 51650, 52663,
                                     53673, 54695, 55717, 56732, 57746, 58761, 59766, 60774, 61792, 62815, 63830, 64838};
  const Draw lengths{{Kind::whole_from, 0, 0, false, 1004, 20}, at::kLong, 0, offset, 64, kRtx3090};
  const auto got = elements(lengths, lengths.launch(), 0, 64).cumsum(0);
  for (size_t i = 0; i < ends.size(); ++i) CHECK(got[static_cast<int64_t>(i)].item<int64_t>() == ends[i]);
}

TEST_CASE("cuda printed: dropout") {
  const auto mask = [](uint64_t seed, int64_t numel, double keep, const Launch& launch) {
    const Draw draw{{Kind::dropout, keep}, at::kBool, seed, 0, numel, kAny};
    return elements(draw, launch, 0, numel);
  };
  SECTION("four neighbours to a thread") {  // github.com/intel/torch-xpu-ops/issues/2926
    const int64_t numel = 512 * 4 * 1024;
    const auto dropped = mask(1, numel, 0.9, dropout(numel, kRtx4080Super)).logical_not().nonzero().view(-1);
    for (const auto& [at, place] : std::map<int64_t, int64_t>{{0, 8}, {1, 14}, {2, 20}, {-3, 2097121}, {-2, 2097140}, {-1, 2097151}}) {
      CHECK(dropped[at].item<int64_t>() == place);
    }
  }
  SECTION("a thread takes one element, as where nothing divides") {  // github.com/pytorch/pytorch/issues/25690: twice how many were kept
    CHECK(mask(0, 1000 * 1000, 0.5, dropout(1000 * 1000, kP100, 1)).sum().item<int64_t>() * 2 == 999826);
    CHECK(mask(0, 1000 * 1000, 0.5, dropout(1000 * 1000, kK80, 1)).sum().item<int64_t>() * 2 == 999100);
  }
}
