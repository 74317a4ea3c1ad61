// Which words of Philox libtorch's CUDA kernels give to each element of a tensor. With this a rank can draw its shard of what one GPU draws
// for the whole tensor. Plain C++ for host and device.
//
// A GPU launches N threads. Each follows a subsequence of its own, and loops over the tensor in strides. N depends on the whole tensor and
// on the GPU (calc_execution_policy and distribution_elementwise_grid_stride_kernel in ATen's DistributionTemplates.h;
// fused_dropout_kernel_vec in Dropout.cu). One call of the generator gives a thread four words: four numbers of 32 bits, or two of 64.
// Holds for tensors that fit(); libtorch divides larger ones.
#pragma once

#include <dtensor/rng/philox.hpp>

namespace dtensor::rng::cuda {

// Whether all bytes of so many elements are reached by an offset of 32 bits.
DTENSOR_HOST_DEVICE bool fits(int64_t numel, int64_t itemsize) { return (numel - 1) * itemsize < (int64_t{1} << 31) - 1; }

// The GPU whose draws are to be had.
struct Device {
  int64_t multiprocessors = 0;
  int64_t threads_of_each = 0;
};

struct Launch {
  int64_t threads;    // N
  int64_t per_call;   // numbers that a thread makes of one call of the generator
  int64_t vector;     // neighbouring elements that a thread takes at once
  uint64_t advance;   // by how much the generator's offset goes on
};

// Where the number of an element comes from: the block at counter (offset / 4 + call, subsequence), and its place there.
struct Place {
  uint64_t subsequence, call;
  int component;  // of per_call
};

DTENSOR_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

DTENSOR_HOST_DEVICE int64_t threads_for(int64_t work, const Device& device) {
  const int64_t blocks = ceil_div(work, 256), most = device.multiprocessors * (device.threads_of_each / 256);
  return 256 * (blocks < most ? blocks : most);
}

// uniform_, normal_, random_, bernoulli_ of a number, exponential_, cauchy_, log_normal_, geometric_ of `numel` elements, at least one.
// `wide`: double and draws of 64 bits. `counts_wide`: whether the generator's offset goes on by two wide numbers a call, as in newer
// versions of libtorch, or as if there were four.
DTENSOR_HOST_DEVICE Launch distribution(int64_t numel, bool wide, const Device& device, bool counts_wide = true) {
  const int64_t threads = threads_for(numel, device), per_call = wide ? 2 : 4;
  const int64_t counted = wide && !counts_wide ? 4 : per_call;
  return {threads, per_call, 1, static_cast<uint64_t>(((numel - 1) / (threads * counted) + 1) * 4)};
}

// native_dropout of `numel` elements without gaps: a thread takes up to `most` neighbours at once, as many as divide numel. libtorch's
// loads have 16 bytes: `most` is 8 for half precision, 4 for float, 2 for double, or 4 for all in versions before 2.7.
DTENSOR_HOST_DEVICE Launch dropout(int64_t numel, const Device& device, int64_t most = 4) {
  int64_t vector = most;
  while (numel % vector != 0) vector /= 2;
  const int64_t threads = threads_for(numel, device);
  return {threads, 4, vector, static_cast<uint64_t>(((numel - 1) / (threads * 4) + 1) * 4)};
}

// Neighbours are made of calls of their own: of a pair's call two numbers are thrown away.
DTENSOR_HOST_DEVICE Place place_of(int64_t element, const Launch& launch) {
  const int64_t group = element / launch.vector, within = element % launch.vector, round = group / launch.threads;
  const auto subsequence = static_cast<uint64_t>(group % launch.threads);
  if (launch.vector == 1) return {subsequence, static_cast<uint64_t>(round / launch.per_call), static_cast<int>(round % launch.per_call)};
  const int64_t calls = ceil_div(launch.vector, launch.per_call);
  return {subsequence, static_cast<uint64_t>(round * calls + within / launch.per_call), static_cast<int>(within % launch.per_call)};
}

DTENSOR_HOST_DEVICE PhiloxBlock block_at(const Place& place, uint64_t seed, uint64_t offset) {
  return philox4x32_10(seed, offset / 4 + place.call, place.subsequence);
}

}  // namespace dtensor::rng::cuda
