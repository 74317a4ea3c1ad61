// Block attention where queries see few keys each, as in many short sequences of one row: pair by pair, where tiles of scores would be
// hidden for the most part, and each sequence by itself would cost more in calls than in sums.
#pragma once

#include <dtensor/parallel/context/attention_call.hpp>

#pragma GCC visibility push(default)

namespace dtensor::context::detail {

// Whether it is to do a call: on CPUs, of float32 or float64, without dropout, where a mask falls into many pieces and its queries see a
// few dozen keys.
bool suits_short(const at::Tensor& q, const AttentionCall& call);

// As block_attention() and add_block_gradients(), of gradients that are there.
Attended short_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call);
void add_short_gradients(const BlockGradients& into, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OutputGradient& of, const AttentionCall& call);

}  // namespace dtensor::context::detail

#pragma GCC visibility pop
