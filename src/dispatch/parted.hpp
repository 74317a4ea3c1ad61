// Views that had to be copied: on one device their memory and their base's would be one, so a write to either is carried over to the
// other (write_through.hpp). Known by storage, so that views of views, and views that are gone, need no bookkeeping.
#pragma once

#include "src/dispatch/dtensor_impl.hpp"

#include <vector>

namespace dtensor::dispatch {

// How the numbers of a memory differ from those of one device: of the copy of a conjugated view, the imaginary ones are negated.
struct Sign {
  bool conjugated = false, negated = false;
  Sign operator*(Sign other) const { return {conjugated != other.conjugated, negated != other.negated}; }
};

// What a memory holds: a local tensor, and where on one device the tensor that it is part of would lie.
struct Held {
  at::Tensor local;
  LayoutPtr layout;
  int64_t offset;
  bool place_known;  // else strides and offset are not those of one device
  Sign sign;
};

// From now on a write to one of these tensors would be missed by the other. `sign` is the view's relative to the base.
void part(DTensorImpl& base, DTensorImpl& view, bool place_known, Sign sign);

Sign sign_of(const at::Tensor& local);

// Whether a write to this local tensor would be missed by another that lives.
bool is_parted(const at::Tensor& local);

// Those that would miss it, the same on every rank.
std::vector<Held> parted_from(const at::Tensor& local);

}  // namespace dtensor::dispatch
