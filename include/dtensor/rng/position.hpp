// Places in a stream of random numbers: how much a part of a program drew, and going on as if it had. A stage of a pipeline draws what one
// device would draw there, though the stages before it run elsewhere.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

#pragma GCC visibility push(default)

namespace dtensor::rng {

// A generator that goes on from here by itself.
at::Generator copy_of(const at::Generator& generator);

// How much was drawn from `after` since it was as `before`, in the stream's own unit: words of libtorch's CPU generator, offsets of its
// CUDA generator, draws of a dt::Generator. Throws if the two are not of one stream (it was seeded in between), and if half of a pair of
// normal numbers was left or used up (at::randn of fewer than 16 elements on the CPU, an odd number of times): such a place has no number.
int64_t draws_between(const at::Generator& before, const at::Generator& after);

// Leaves the generator as after `draws` more; half of a pair of normal numbers stays. Takes at most a few milliseconds, however many.
void skip_draws(at::Generator& generator, int64_t draws);

// Makes `generator` go on where `other`, of the same kind, is.
void go_on_from(at::Generator& generator, const at::Generator& other);

}  // namespace dtensor::rng

#pragma GCC visibility pop
