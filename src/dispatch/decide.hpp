// The miss path: from an operator call to a decision.
#pragma once

#include "src/dispatch/decision.hpp"

#include <dtensor/dispatch/placement_option.hpp>

#include <functional>
#include <memory>

namespace dtensor::dispatch {

// Per mesh dimension, every choice that the resolver had.
using Trace = std::vector<std::vector<PlacementOption>>;

// Decides how the call on `arguments` (tensors still distributed) runs. Communicates nothing, except for the check of plain
// tensors that are used as replicated inside Spmd. Throws for tensors of two meshes, plain tensors outside Spmd, an in-place
// operator whose own operand would have to move. With a `trace`, which gets all choices, for explaining only: nothing is checked
// between ranks and no warning is given.
std::shared_ptr<Decision> decide(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
                                 Trace* trace = nullptr);

// Throws for operators that would part a layout from its local part.
void check_supported(const OpInfo& info);

// The mesh of the distributed operands, else that of Spmd; all must share it.
DeviceMesh common_mesh(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// The cheapest legal placements for `call` (src/dispatch/resolver.cpp). `rule` may be null: everything replicated.
rules::Resolution resolve(rules::Call& call, const OpInfo& info, const rules::Rule* rule, Trace* trace);

// The operator's outputs on one device, by running it on meta tensors; none when libtorch has no meta kernel for it. Throws what the
// operator refuses, in its words.
c10::optional<std::vector<rules::OutputMeta>> meta_outputs(const c10::OperatorHandle& op, const rules::Call& call);

// The same, for results as they are, given how to represent the tensors among the arguments.
using ToMeta = std::function<at::Tensor(const at::Tensor&)>;
c10::optional<Stack> meta_results(const c10::OperatorHandle& op, const rules::Call& call, const ToMeta& to_meta);

// A tensor of the same sizes, strides and dtype on the meta device.
at::Tensor on_meta(const at::Tensor& tensor);

// Throws what an out= form refuses on meta tensors, in its words: dtypes of `out` above all. `arguments` are distributed.
void check_out_form(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// Whether shapes hang on values: how many elements a mask selects.
bool selects_by_mask(const rules::Call& call);

// Runs one of libtorch's operators on stand-ins of the global sizes and throws, in its words, when it refuses them whatever their
// values. Returns whether it was tried: not with large tensors, out= forms, random operators, and operators of others.
bool rehearse(const c10::OperatorHandle& op, const rules::Call& call);

// "aten::mm(f32[4, 3] (S(0)), f32[3, 5] (R)) on DeviceMesh(...)" for messages.
std::string describe(const rules::Call& call);

}  // namespace dtensor::dispatch
