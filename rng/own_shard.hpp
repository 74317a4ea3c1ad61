// Draws the calling rank's shard of what one device draws for a whole tensor.
#pragma once

#include "rng/draw.hpp"

#include <dtensor/mesh/layout.hpp>

namespace dtensor::rng {

// The shard, dense in the order of the global tensor's memory. Leaves the generator as one device's draw of the whole tensor does. Takes
// memory for the shard and a window.
at::Tensor draw_own_shard(const Layout& layout, const Draw& draw, at::Generator generator);

// Only leaves the generator as the draw of the whole tensor does, and draws as little as that takes.
void skip_draw(c10::IntArrayRef sizes, c10::IntArrayRef strides, const Draw& draw, at::Generator generator);

}  // namespace dtensor::rng
