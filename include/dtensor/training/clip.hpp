// The norm of all gradients together, whatever their layouts, in one collective; and clipping by it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dtensor {

// The norm of the gradients of `parameters` as if they were one vector: (sum |g|^p)^(1/p), or the largest |g| for an infinite `norm_type`.
// The same value on every rank, and that of one device.
//
// Parameters are plain tensors (counted as equal on all ranks) and DTensors under any placements, also mixed and on meshes of which one
// holds the others; those without a gradient are passed over, and one that is listed twice counts once. Without any gradient: 0.
// Partial gradients are reduced first, as sync_gradients() does. Then communicates 8 bytes per rank: one all_reduce over the mesh
// dimensions along which any gradient is cut, none when none is. (Meshes of which none holds the other reduce one after the other.)
//
// Half-precision gradients are added up in float32. Throws for a `norm_type` that is not positive, undefined parameters, sparse
// gradients, and gradients on several devices.
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2);

// Multiplies the gradients by min(1, max_norm / (norm + 1e-6)), in place, and returns the norm before (grad_norm() says what that
// communicates). An infinite max_norm only measures. Of a norm that is not finite the factor is 0 or NaN, as torch::nn::utils::
// clip_grad_norm_ has it; with `error_if_nonfinite` it is an error instead, and the gradients stay. Throws also for a negative max_norm.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2, bool error_if_nonfinite = false);

// The same with a norm that is known already: of more gradients than this rank has, say, where stages of a pipeline add up theirs.
// Communicates nothing.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm);

}  // namespace dtensor
