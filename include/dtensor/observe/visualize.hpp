// Pictures of layouts: which rank holds which part of a tensor.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <string>

#pragma GCC visibility push(default)

namespace at { class Tensor; }

namespace dtensor {

// Text that shows which ranks hold which region: a row of cells for one dim, a grid for two (dim 0 down, dim 1 across), one line per
// region for more. "0 1": both hold the cell. "0+1": it is a reduction of what they hold. Cells show bounds, not elements, and
// grids with many cells become lists. Reads metadata only, on any rank, on meshes of any transport. Throws for a plain tensor.
std::string visualize(const at::Tensor& tensor);
std::string visualize(const Layout& layout);

// The same as an SVG file, coloured by the first rank of each region; of tensors with more than two dims, the first two that are
// cut. Throws when `path` cannot be written.
void visualize_svg(const at::Tensor& tensor, const std::string& path);
void visualize_svg(const Layout& layout, const std::string& path);

}  // namespace dtensor

#pragma GCC visibility pop
