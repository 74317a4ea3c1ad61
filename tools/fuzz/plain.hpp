// A program on one device.
#pragma once

#include "ops.hpp"

#include <memory>
#include <optional>

namespace dtensor::fuzz {

// The leaf's values, in the memory order it asks for.
at::Tensor data_of(const Leaf& leaf);

class PlainRun {
 public:
  explicit PlainRun(bool infinities = false) : infinities_(infinities) {}

  // Runs a step. False: it threw, or its values are not tame (NaN, infinite but in a program of infinities, too large, or a jump near
  // rounding noise), or an operand is missing. Nothing has then changed, unless the step writes in place.
  bool run(const Step& step);

  // The results of the last operator whose step has no numbers for them yet: a draw does not know how many there will be.
  Tensors results;
  // Gives them numbers from `first` on; they are values from then on.
  std::vector<int> number_results(int first);
  void forget(int value) { values_.erase(value); }

  bool has(int value) const { return values_.count(value) != 0; }
  const at::Tensor& value(int value) const { return values_.at(value); }
  const std::map<int, at::Tensor>& values() const { return values_; }
  Quality quality(T value) const;

 private:
  bool run_call(const Step& step);
  bool keep(T value, Quality quality, bool fresh);

  bool infinities_;
  std::map<int, at::Tensor> values_;
  std::map<const void*, Quality> quality_;  // by memory, so that views share it
};

// The whole program without the steps that were refused; nothing where it does not run or is not tame.
std::optional<Outcome> run_plain(const Program& program, const std::map<int, std::string>& refused);

// Backward from the roots: autograd::grad with cotangents and, for the whole, .backward(). `place` makes a cotangent.
void run_backward(const Program& program, const std::map<int, at::Tensor>& values,
                  const std::function<at::Tensor(const Leaf&)>& place, Outcome& outcome);

// To be called after a write in place: autograd notes it in the views of what was written only when they are looked at, and libtorch
// 1.13 takes a view for a leaf until then. Throws where the write left a view that autograd refuses to look at.
void see_writes(const std::map<int, at::Tensor>& values);

// What an operator was given and gives.
Tensors run_op(const Step& step, const Tensors& in);

}  // namespace dtensor::fuzz
