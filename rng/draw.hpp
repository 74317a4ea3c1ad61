// A call of a random operator, which can be repeated on other tensors and generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace dtensor::rng {

// A random operator that writes a tensor, its first argument.
struct Draw {
  c10::OperatorHandle op;
  c10::Stack arguments;        // as in the schema; the tensor and the generator are filled in
  at::TensorOptions options;  // of the tensor

  void fill(const at::Tensor& to, const at::Generator& generator) const;

  bool is(const char* name) const { return op.schema().name() == name; }  // "aten::uniform_"
};

// Makes a Draw from the arguments between the tensor and the generator.
Draw draw_of(const c10::OperatorHandle& op, std::initializer_list<c10::IValue> between, const at::TensorOptions& options);

}  // namespace dtensor::rng
