// The kernels, which nvcc compiles. Without it, no_kernels.cpp stands in for them, and has none.
#pragma once

#include "rng/counter_fill.hpp"
#include "rng/cuda/mapping.hpp"
#include "rng/cuda/part_index.hpp"

#include <c10/core/ScalarType.h>

namespace dtensor::rng::cuda {

bool have_kernels();

// The current device, and its current cudaStream_t.
Device current_device();
void* current_stream();

// Whether that stream is recorded for a CUDA graph. A kernel of ours gets its seed as a number, and would draw the same at each replay.
bool is_capturing();

// Where to write the elements of a part, one after the other: memory of the current device.
struct Elements {
  void* to;
  c10::ScalarType dtype;
  int64_t count;
  PartIndex part;
  void* stream;
};

// The words that libtorch's kernels take.
struct Words {
  uint64_t seed, offset;
  Launch launch;
};

enum class Kind { uniform, normal, log_normal, exponential, cauchy, geometric, bernoulli, whole, whole_from, dropout };

// What libtorch makes of them.
struct Numbers {
  Kind kind;
  double a = 0, b = 0;     // from and to, mean and std, lambda, ...
  bool wide = false;       // of two words each
  int64_t from = 0;        // Kind::whole_from
  uint64_t range = 0;
};

// libtorch's draw. False when there is no such kernel.
bool draw(const Elements& elements, const Words& words, const Numbers& numbers);

// dt::Generator's.
bool draw_by_counter(const Elements& elements, const CounterDraw& draw, const CounterNumbers& numbers);

}  // namespace dtensor::rng::cuda
