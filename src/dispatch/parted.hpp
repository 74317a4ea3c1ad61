// Views that had to be copied: their memory and their base's would be one on one device, so a write to either is refused while both
// live. Known by storage, so that views of views, and views that are gone, need no bookkeeping.
#pragma once

#include <ATen/core/Tensor.h>

namespace dtensor::dispatch {

// From now on a write to one of these local tensors would be missed by the other.
void part(const at::Tensor& a, const at::Tensor& b);

// Whether a write to this local tensor would be missed by another that lives.
bool is_parted(const at::Tensor& local);

}  // namespace dtensor::dispatch
