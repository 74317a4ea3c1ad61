// The CUDA kernels, which nvcc compiles. In builds without nvcc, no_kernels.cpp stands in for them and has none.
#pragma once

#include "rng/counter_fill.hpp"
#include "rng/cuda/mapping.hpp"
#include "rng/cuda/shard_index.hpp"

#include <c10/core/ScalarType.h>

namespace dtensor::rng::cuda {

bool have_kernels();

// The current device, and its current cudaStream_t.
Device current_device();
void* current_stream();

// Whether that stream is being captured for a CUDA graph. A kernel of ours gets its seed as a number, so each replay would draw the same.
bool is_capturing();

// Where to write the elements of a shard, one after the other: memory of the current device.
struct Elements {
  void* to;
  c10::ScalarType dtype;
  int64_t count;
  ShardIndex part;
  void* stream;
};

// The random words that libtorch's kernels use.
struct Words {
  uint64_t seed, offset;
  Launch launch;
};

enum class Kind { uniform, normal, log_normal, exponential, cauchy, geometric, bernoulli, whole, whole_from, dropout };

// The numbers that libtorch makes of the words.
struct Numbers {
  Kind kind;
  double a = 0, b = 0;     // from and to, mean and std, lambda, ...
  bool wide = false;       // two words for each number
  int64_t from = 0;        // Kind::whole_from
  uint64_t range = 0;
};

// Draws as libtorch does. Returns false when there is no such kernel.
bool draw(const Elements& elements, const Words& words, const Numbers& numbers);

// Draws as dt::Generator does.
bool draw_by_counter(const Elements& elements, const CounterDraw& draw, const CounterNumbers& numbers);

}  // namespace dtensor::rng::cuda
