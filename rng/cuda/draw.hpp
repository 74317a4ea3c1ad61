// Draws the calling rank's shard of what one GPU draws for a whole tensor.
//
// The kernels are ours and imitate those of libtorch. Before a kernel is used for the first time, it is compared with libtorch's on this
// GPU. If this libtorch draws other numbers, the whole tensor is drawn and a shard kept, with a warning.
#pragma once

#include "rng/draw.hpp"

#include <dtensor/mesh/layout.hpp>

#include <vector>

namespace dtensor::rng::cuda {

// The shard. If there is no kernel, draws nothing and returns an undefined tensor.
at::Tensor draw_own_shard(const Layout& layout, const Draw& draw, const at::Generator& generator);

// Leaves the generator as the draw of a whole tensor of `numel` elements does. If there is no kernel, does nothing and returns false.
bool skip_draw(int64_t numel, const Draw& draw, const at::Generator& generator);

// native_dropout of the calling rank's shard: (output, mask).
std::vector<c10::IValue> dropout(const at::Tensor& input, const Layout& layout, double keep, const at::Generator& generator);

}  // namespace dtensor::rng::cuda
