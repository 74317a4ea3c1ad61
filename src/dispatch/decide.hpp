// The miss path: makes a decision for an operator call.
#pragma once

#include "src/dispatch/decision.hpp"

#include <dtensor/dispatch/placement_option.hpp>

#include <functional>
#include <memory>

namespace dtensor::dispatch {

// For each mesh dimension, the options that the resolver had.
using Trace = std::vector<std::vector<PlacementOption>>;

// Decides how the call on `arguments` (still distributed tensors) runs. Communicates nothing, except to check plain tensors that are used
// as replicated inside Spmd. Throws for tensors of two meshes, plain tensors outside Spmd, and an in-place operator whose own operand would
// have to move. With a `trace` it only explains: the trace gets all options, nothing is checked between ranks, and no warning is given.
std::shared_ptr<Decision> decide(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
                                 Trace* trace = nullptr);

// Throws for operators that would make a layout and its local tensor disagree.
void check_supported(const OpInfo& info);

// The mesh of the distributed operands, else that of Spmd; all must share it.
DeviceMesh common_mesh(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// The cheapest legal placements for `call` (src/dispatch/resolver.cpp). `rule` may be null: everything replicated.
rules::Resolution resolve(rules::Call& call, const OpInfo& info, const rules::Rule* rule, Trace* trace);

// The operator's outputs on one device, found by running it on meta tensors; none if libtorch has no meta kernel for it. If the operator
// throws, its error is thrown.
c10::optional<std::vector<rules::OutputMeta>> meta_outputs(const c10::OperatorHandle& op, const rules::Call& call);

// The same, but returns the results themselves. `to_meta` makes the meta tensors for the arguments.
using ToMeta = std::function<at::Tensor(const at::Tensor&)>;
c10::optional<Stack> meta_results(const c10::OperatorHandle& op, const rules::Call& call, const ToMeta& to_meta);

// A tensor of the same sizes, strides and dtype on the meta device.
at::Tensor on_meta(const at::Tensor& tensor);

// Throws the error that an out= form throws on meta tensors, above all for dtypes of `out`. `arguments` are distributed.
void check_out_form(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// Whether shapes depend on values: on how many elements a mask selects.
bool selects_by_mask(const rules::Call& call);

// Runs one of libtorch's operators on stand-ins of the global sizes. If it throws for all values that are tried, its error is thrown.
// Returns whether the operator was tried; large tensors, out= forms, random operators, and operators of other libraries are not.
bool rehearse(const c10::OperatorHandle& op, const rules::Call& call);

// "aten::mm(f32[4, 3] (S(0)), f32[3, 5] (R)) on DeviceMesh(...)" for messages.
std::string describe(const rules::Call& call);

}  // namespace dtensor::dispatch
