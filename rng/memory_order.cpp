#include "rng/memory_order.hpp"

#include <algorithm>
#include <numeric>

namespace dtensor::rng {

Sizes memory_order(c10::IntArrayRef strides) {
  Sizes order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

at::Tensor in_place(const at::Tensor& flat, const Layout& layout, const Sizes& order) {
  Sizes sizes, back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    sizes.push_back(layout.local_sizes()[order[i]]);
    back[order[i]] = static_cast<int64_t>(i);
  }
  return flat.view(sizes).permute(back);
}

}  // namespace dtensor::rng
