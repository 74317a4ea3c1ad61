#include "rng/memory_order.hpp"

namespace dtensor::rng {

at::Tensor in_place(const at::Tensor& flat, const Layout& layout, const Sizes& order) {
  if (layout.is_flat()) return flat.view(layout.local_sizes());
  Sizes sizes, back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    sizes.push_back(layout.local_sizes()[order[i]]);
    back[order[i]] = static_cast<int64_t>(i);
  }
  return flat.view(sizes).permute(back);
}

}  // namespace dtensor::rng
