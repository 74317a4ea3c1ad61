// Records operator calls on the tape.
#pragma once

#include "src/deferred/tape.hpp"

namespace dtensor::deferred {

class TapeRecorder final : public dispatch::Recorder {
 public:
  explicit TapeRecorder(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}

  void record(const c10::OperatorHandle& op, const dispatch::OpInfo& info, dispatch::Stack& stack, size_t begin) override;

 private:
  using Arguments = std::vector<c10::IValue>;

  // Records a draw into the first argument, and advances the generator without drawing.
  void record_draw(const c10::OperatorHandle& op, const DeviceMesh& mesh, Arguments arguments);

  // Computes the call now, since meta tensors cannot tell its results; these become constants.
  dispatch::Stack record_values(const c10::OperatorHandle& op, const dispatch::OpInfo& info, const DeviceMesh& mesh,
                                const Arguments& arguments);

  // The argument in the form in which an entry keeps it.
  c10::IValue on_tape(const c10::IValue& argument) const;

  // The results of the call recorded as `entry`; fills in the entry's outputs.
  dispatch::Stack results_of(const dispatch::OpInfo& info, Entry& entry, const Arguments& arguments, const dispatch::Stack& metas);

  at::Tensor constant(const at::Tensor& value, const DeviceMesh& mesh);
  void write(const at::Tensor& tensor, const at::Tensor& value, const DeviceMesh& mesh);

  std::shared_ptr<Tape> tape_;
};

}  // namespace dtensor::deferred
