// The norm of all gradients together, in one collective whatever their layouts; and clipping by it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dtensor {

// The norm of the gradients of `parameters` as if they were one vector: (sum |g|^p)^(1/p), or the largest |g| for an infinite `norm_type`.
// Every rank gets the same value, which is that of one device. Without any gradient it is 0.
//
// Parameters may be plain tensors (which count as equal on all ranks) and DTensors under any placements, mixed. Their meshes may differ if
// one holds the others. Parameters without a gradient are skipped, and one that is listed twice counts once.
//
// Reduces Partial gradients first, as sync_gradients() does. Then communicates 8 bytes per rank: one all_reduce over the mesh dimensions
// along which any gradient is sharded, none when none is. (Meshes of which none holds the other reduce one after the other.)
//
// Adds half-precision gradients up in float32. Throws for a `norm_type` that is not positive, undefined parameters, sparse gradients, and
// gradients on several devices.
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2);

// Clips: multiplies the gradients by min(1, max_norm / (norm + 1e-6)), in place, and returns the norm before. Communicates what grad_norm()
// does. With an infinite max_norm it only measures. If the norm is not finite, the factor is 0 or NaN, as in
// torch::nn::utils::clip_grad_norm_; with `error_if_nonfinite` it throws instead, and the gradients stay. Throws also for a negative
// max_norm.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2, bool error_if_nonfinite = false);

// The same with a norm that is known already. Example: the norm over all stages of a pipeline, of which this rank has one. Communicates
// nothing.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm);

}  // namespace dtensor
