// The calling rank's part of what one device draws for a whole tensor.
#pragma once

#include "rng/draw.hpp"

#include <dtensor/mesh/layout.hpp>

namespace dtensor::rng {

// The local part, dense in the order of the global tensor's memory. Leaves the generator as one device's draw of the whole tensor does,
// and takes memory for the part and a window.
at::Tensor draw_own_part(const Layout& layout, const Draw& draw, at::Generator generator);

// Leaves the generator so, and draws as little as that takes.
void skip_draw(c10::IntArrayRef sizes, c10::IntArrayRef strides, const Draw& draw, at::Generator generator);

}  // namespace dtensor::rng
