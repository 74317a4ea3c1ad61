// The miss path: from an operator call to a decision.
#pragma once

#include "src/dispatch/decision.hpp"

#include <memory>

namespace dtensor::dispatch {

// Decides how the call on `arguments` (tensors still distributed) runs. Communicates nothing, except for the check of plain
// tensors that are used as replicated inside Spmd. Throws for tensors of two meshes, plain tensors outside Spmd, an in-place
// operator whose own operand would have to move.
std::shared_ptr<Decision> decide(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// The cheapest legal placements for `call` (src/dispatch/resolver.cpp). `rule` may be null: everything replicated.
rules::Resolution resolve(rules::Call& call, const OpInfo& info, const rules::Rule* rule);

// The operator's outputs on one device, by running it on meta tensors; empty when libtorch has no meta kernel for it.
std::vector<rules::OutputMeta> meta_outputs(const c10::OperatorHandle& op, const rules::Call& call);

// Throws on every rank, naming operator and ranks, when a plain tensor that counts as replicated differs between ranks.
void check_replicated(std::string_view op, const at::Tensor& tensor, const DeviceMesh& mesh);

// "aten::mm(f32[4, 3] (S(0)), f32[3, 5] (R)) on DeviceMesh(...)" for messages.
std::string describe(const rules::Call& call);

}  // namespace dtensor::dispatch
