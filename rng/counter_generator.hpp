// The generator behind dtensor::Generator.
#pragma once

#include "rng/counter_fill.hpp"

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GeneratorImpl.h>

namespace dtensor::rng {

// Its state is a seed, and how many draws there were. On no device that libtorch draws on, so that a kernel which does not know it throws.
class CounterGenerator final : public c10::GeneratorImpl {
 public:
  explicit CounterGenerator(uint64_t seed);

  // The next draw.
  CounterDraw draw() { return {seed_, drawn_++}; }

  void set_current_seed(uint64_t seed) override { seed_ = seed, drawn_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void set_offset(uint64_t offset);  // virtual in newer versions of libtorch: the number of draws
  uint64_t get_offset() const;

 private:
  c10::GeneratorImpl* clone_impl() const override;

  uint64_t seed_, drawn_ = 0;
};

// Null for other generators.
CounterGenerator* as_counter(const at::Generator& generator);

// While it lives, in the calling thread, an element of what is drawn is known by another index than its position in the tensor: its place
// among `runs`.
class CounterRuns {
 public:
  explicit CounterRuns(const Runs& runs);
  ~CounterRuns();
  CounterRuns(const CounterRuns&) = delete;
  CounterRuns& operator=(const CounterRuns&) = delete;

 private:
  const Runs* outer_;
};

// Whether the operator, which writes a plain tensor, its first argument, is drawn by draw_by_counter().
bool draws_by_counter(const c10::OperatorHandle& op);

// Runs it, leaving its first argument alone on the stack.
void draw_by_counter(const c10::OperatorHandle& op, CounterGenerator& generator, c10::Stack& stack);

}  // namespace dtensor::rng
