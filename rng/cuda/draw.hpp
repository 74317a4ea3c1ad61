// A rank's part of what one GPU draws for a whole tensor.
//
// By kernels of ours that follow those of libtorch. Before one is used for the first time, it is compared with libtorch's on the GPU at
// hand: where a version of libtorch draws otherwise, the whole tensor is drawn, and a part kept, with a warning.
#pragma once

#include "rng/draw.hpp"

#include <dtensor/mesh/layout.hpp>

#include <vector>

namespace dtensor::rng::cuda {

// An undefined tensor, and nothing is drawn, where there is no kernel.
at::Tensor draw_own_part(const Layout& layout, const Draw& draw, const at::Generator& generator);

// Leaves the generator as the draw of a whole tensor of `numel` elements does. False, and nothing is done, where there is no kernel.
bool skip_draw(int64_t numel, const Draw& draw, const at::Generator& generator);

// native_dropout of the calling rank's part: (output, mask).
std::vector<c10::IValue> dropout(const at::Tensor& input, const Layout& layout, double keep, const at::Generator& generator);

}  // namespace dtensor::rng::cuda
