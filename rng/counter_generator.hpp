// The generator behind dtensor::Generator.
#pragma once

#include "rng/counter_fill.hpp"
#include "rng/cuda/shard_index.hpp"
#include "rng/draw.hpp"

#include <c10/core/GeneratorImpl.h>

namespace dtensor::rng {

// Its state is a seed and the number of draws so far. Its device is none that libtorch draws on, so that a kernel which does not know it
// throws.
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

// Whether draw_by_counter() can draw the operator, which writes its first argument, a plain tensor.
bool draws_by_counter(const c10::OperatorHandle& op);

// Runs the operator, and leaves only its first argument on the stack.
void draw_by_counter(const c10::OperatorHandle& op, CounterGenerator& generator, c10::Stack& stack);

// at::normal of tensors. normal_by_counter() runs it on plain tensors: it draws, scales and shifts, as ATen does.
bool is_normal_of_tensors(const c10::OperatorHandle& op);
void normal_by_counter(const c10::OperatorHandle& op, const at::Generator& generator, c10::Stack& stack);

// Where the elements of a shard are in the whole tensor, in row-major order: as runs for the CPU, and as an index for a GPU.
struct LocalShard {
  Runs runs;
  std::function<std::optional<cuda::ShardIndex>()> index;
};

// Draws a shard into a contiguous tensor of as many elements.
void draw_by_counter(const Draw& draw, CounterGenerator& generator, const at::Tensor& to, const LocalShard& part);

}  // namespace dtensor::rng
