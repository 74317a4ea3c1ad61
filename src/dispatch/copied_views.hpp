// Remembers views that had to be copied. On one device such a view shares memory with its base, so a write to either has to be carried over
// to the other (write_through.hpp). They are known by storage, so views of views, and views that are gone, need no bookkeeping.
#pragma once

#include "src/dispatch/dtensor_impl.hpp"

#include <vector>

namespace dtensor::dispatch {

// How the numbers in memory differ from those of one device. In the copy of a conjugated view, the imaginary numbers are negated.
struct Sign {
  bool conjugated = false, negated = false;
  Sign operator*(Sign other) const { return {conjugated != other.conjugated, negated != other.negated}; }
};

// A local tensor, and the place of its whole tensor in the memory of one device.
struct Held {
  at::Tensor local;
  LayoutPtr layout;
  int64_t offset;
  bool place_known;  // false: strides and offset are not those of one device
  Sign sign;
};

// Whether two elements of a tensor may lie at one place in memory, as those of an unfolded one.
bool overlaps(const Layout& layout);

// Notes that a write to one of these tensors does not reach the other by itself. `sign` is that of the view relative to the base.
void join_copies(DTensorImpl& base, DTensorImpl& view, bool place_known, Sign sign);

Sign sign_of(const at::Tensor& local);

// Whether a write to this local tensor has to be carried over to another one that still exists.
bool has_copied_views(const at::Tensor& local);
// Whether there may be such tensors at all, in this process.
bool any_copied_views();

// The tensors that a write has to be carried over to; the same on every rank.
std::vector<Held> copies_of(const at::Tensor& local);

}  // namespace dtensor::dispatch
